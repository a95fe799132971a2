"""The whole loop on real parts: engine, driver, episodes, queue, steps; tiny model, no mock."""

import asyncio
import dataclasses
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import config as c
from sao_jax.checks import check
from sao_jax.envs.base import EnvFailure, Step
from sao_jax.outcome import RunFailed
from sao_jax.rollout.service import RolloutService
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.metrics import Writer
from sao_jax.train.run import held_out
from sao_jax.train.sao import train_sao
from sao_jax.train.state import load_policy, make_critic
from sao_jax.train.updates import LoopSteps, joined
from sao_jax.types import Message


def tiny_config(**rollout) -> c.Config:
  return check(
    c.Config(
      num_steps=3,
      batch_size=8,
      model=c.ModelConfig(
        vocab_size=64,
        d_model=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        d_ff=16,
        num_experts=2,
        experts_per_token=1,
      ),
      task=c.TaskConfig(difficulty=2, digits=1, eval_size=8),
      env=c.EnvConfig(max_turns=3, max_tokens=48, max_turn_tokens=12, max_observation=4),
      sandbox=c.SandboxConfig(backend="expr"),
      rollout=c.RolloutConfig(slots=4, max_len=48, max_running=12, **rollout),
      packing=c.PackingConfig(lengths=(48,), max_segments=1),
      policy=c.PolicyConfig(lr=1e-3),
      critic=c.CriticConfig(lr=1e-3, warmup_steps=0),
      evaluate=c.EvaluateConfig(problems=8),
    )
  )


def run_loop(config: c.Config, run_dir, wrap_env=None):
  """(rows of metrics.jsonl, policy state, critic state)."""
  policy = load_policy(config)
  steps = LoopSteps(config, policy, *make_critic(policy))
  with (
    Writer(run_dir) as writer,
    RolloutService(config, policy.config, policy.params, policy.chat) as service,
  ):
    if wrap_env is not None:
      make_env = service.make_env
      service.make_env = lambda: wrap_env(make_env())
    policy_state, critic_state = train_sao(config, steps, policy.chat, service, writer)
  return read_rows(run_dir / "metrics.jsonl"), policy_state, critic_state


def accounts_balance(row) -> bool:
  ends = ("trained", "dropped", "failed", "queued", "running", "in_training")
  return row["accounting/started"] == sum(row[f"accounting/{name}"] for name in ends)


class Talkative:
  """Half of the tasks get two turns of the tool before the real environment sees a reply."""

  def __init__(self, env):
    self.env, self.turns = env, 0

  async def reset(self, task):
    self.turns = 2 * (task.serial % 2)
    return await self.env.reset(task)

  async def step(self, reply):
    if self.turns:
      self.turns -= 1
      return Step([Message(role="tool", content=str(self.turns))], 0.0, False)
    return await self.env.step(reply)

  async def close(self):
    await self.env.close()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_at_learning_rate_zero_trainer_and_engine_agree(tmp_path, temperature, sync):
  config = tiny_config(temperature=temperature, max_staleness=0 if sync else 2)
  config.policy.lr = 0.0
  rows, _, _ = run_loop(config, tmp_path, Talkative)
  assert [row["step"] for row in rows] == [1, 2, 3]
  for row in rows:
    assert row["loss/masked"] == 0
    assert row["ratio/max_gap"] < 1e-4
    assert row["episode/turns"] > 1  # several turns among them
    assert accounts_balance(row)


def test_synchronous_mode_is_on_policy_and_bit_reproducible(tmp_path):
  config = tiny_config(max_staleness=0)
  first, second = (run_loop(config, tmp_path / name, Talkative) for name in "ab")
  for row in first[0]:
    assert row["staleness/max"] == 0
    assert row["staleness/histogram"] == [row["batch/action_tokens"]]
  for a, b in zip(jax.tree.leaves(first[1:]), jax.tree.leaves(second[1:]), strict=True):
    np.testing.assert_array_equal(a, b)
  other = dataclasses.replace(config, seed=1)
  third = run_loop(other, tmp_path / "c", Talkative)
  assert not np.array_equal(jax.tree.leaves(first[1])[0], jax.tree.leaves(third[1])[0])


@pytest.mark.parametrize("bound", [1, 2])
def test_asynchronous_staleness_stays_within_its_bound(tmp_path, bound):
  config = tiny_config(max_staleness=bound)
  config.num_steps = 8
  rows, _, _ = run_loop(config, tmp_path, Talkative)
  assert max(row["staleness/trained_max"] for row in rows) <= bound
  assert max(row["staleness/max"] for row in rows) >= 1  # it really ran ahead
  assert all(accounts_balance(row) for row in rows)
  assert rows[-1]["accounting/trained"] + rows[-1]["accounting/in_training"] == 64


class FlakyEnv:
  """A real environment in infrastructure that fails: 20 % raise, 5 % hang past their deadline."""

  def __init__(self, env, rng, lock):
    self.env = env
    with lock:
      draw = rng.random()
    self.fate = "raise" if draw < 0.2 else "hang" if draw < 0.25 else "fine"

  async def reset(self, task):
    return await self.env.reset(task)

  async def step(self, reply):
    if self.fate == "raise":
      raise EnvFailure("the sandbox service went away")
    if self.fate == "hang":
      await asyncio.sleep(3600)
    return await self.env.step(reply)

  async def close(self):
    await self.env.close()


def test_failing_infrastructure_is_counted_and_never_trained(tmp_path):
  config = tiny_config(max_staleness=1, attempts=1, await_seconds=1.0)
  config.num_steps = 6
  rng, lock = random.Random(0), threading.Lock()
  rows, _, _ = run_loop(config, tmp_path, lambda env: FlakyEnv(env, rng, lock))
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]  # batches kept filling
  for row in rows:
    assert accounts_balance(row)
    assert row["batch/episodes"] == 8
    assert row["staleness/trained_max"] <= 1
  assert rows[-1]["accounting/failed"] > 0
  reasons = {key for key in rows[-1] if key.startswith("accounting/failed/")}
  assert reasons <= {"accounting/failed/EnvFailure", "accounting/failed/EpisodeStalled"}
  assert "accounting/failed/EnvFailure" in reasons


class DigitBandit:
  """One token, reward 1 for a digit: the best action and the value of the prompt are known."""

  def __init__(self, env):
    self.env = env

  async def reset(self, task):
    return [Message(role="user", content="1+1")]

  async def step(self, reply):
    return Step([], float(reply["content"].isdigit()), True)

  async def close(self):
    await self.env.close()


def test_a_bandit_is_solved_and_its_value_found(tmp_path):
  config = tiny_config(max_staleness=1)
  config = dataclasses.replace(config, num_steps=50, batch_size=16)
  config.env.max_turn_tokens = 1
  config.policy.lr = config.critic.lr = 2e-2
  rows, _, _ = run_loop(config, tmp_path, DigitBandit)
  first, last = rows[:5], rows[-5:]
  assert np.mean([row["episode/reward"] for row in first]) < 0.5
  assert np.mean([row["episode/reward"] for row in last]) > 0.95
  assert np.mean([row["critic/value_mean"] for row in last]) == pytest.approx(1.0, abs=0.15)


class FailsOnce:
  """Each task's first attempt fails; ``broken`` tasks always do."""

  def __init__(self, env, seen, broken=()):
    self.env, self.seen, self.broken = env, seen, broken

  async def reset(self, task):
    self.seen[task.serial] = self.seen.get(task.serial, 0) + 1
    if self.seen[task.serial] == 1 or task.serial in self.broken:
      raise EnvFailure("not this time")
    return await self.env.reset(task)

  async def step(self, reply):
    return await self.env.step(reply)

  async def close(self):
    await self.env.close()


def test_evaluation_retries_and_then_names_the_failure():
  config = tiny_config(max_staleness=0, attempts=2)
  policy = load_policy(config)
  tasks = held_out(config)
  with RolloutService(config, policy.config, policy.params, policy.chat) as service:
    make_env, seen = service.make_env, {}
    service.make_env = lambda: FailsOnce(make_env(), seen)
    episodes = service.run(tasks, temperature=1.0, seed=3)
    assert [(e.task_serial, e.attempt) for e in episodes] == [(i, 1) for i in range(8)]
    seen.clear()
    service.make_env = lambda: FailsOnce(make_env(), seen, broken=(5,))
    with pytest.raises(RunFailed, match=r"failed 2 times .*EnvFailure: not this time"):
      service.run(tasks, temperature=1.0, seed=3)


def test_schedules_end_with_the_run_whatever_the_number_of_updates(tmp_path):
  config = tiny_config()
  config.policy.minibatches, config.policy.schedule = 4, "cosine"
  config = dataclasses.replace(config, num_steps=40)
  config.critic.only_steps = 10
  policy = load_policy(config)
  steps = LoopSteps(config, policy, *make_critic(policy))
  assert steps.policy_rate(0) == pytest.approx(config.policy.lr)
  assert steps.policy_rate(4 * 29) == pytest.approx(config.policy.lr * 0.1)
  assert steps.policy_rate(4 * 20) > 0.2 * config.policy.lr


def test_what_must_not_hide_is_the_worst_of_several_updates():
  updates = [
    {"policy/nonfinite": jnp.float32(1), "policy/loss": jnp.float32(2)},
    {"policy/nonfinite": jnp.float32(0), "policy/loss": jnp.float32(3)},
  ]
  assert joined(updates) == {"policy/nonfinite": 1, "policy/loss": 3}
