"""Episodes: ids are the sampled ones, rewards sit on actions, budgets are budgets."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest

from sao_jax.config import EnvConfig, RolloutConfig
from sao_jax.envs.base import EnvFailure, Step
from sao_jax.envs.pool import WorkerPool
from sao_jax.rollout import episode as module
from sao_jax.rollout.client import BadRequest, EngineFailure
from sao_jax.rollout.episode import (
  EpisodeLimits,
  EpisodeStalled,
  Progress,
  RewardError,
  TaskRefused,
  TrajectoryBuilder,
  run_episode,
  sampling_key,
)
from sao_jax.types import Episode, Message, Sampling
from tests.rollout.scripted import (
  CHAT,
  ScriptedClient,
  ScriptedEnv,
  completion,
  done,
  forever,
  says,
  task,
  tool,
)

LIMITS = EpisodeLimits(
  max_turns=4, max_tokens=64, max_turn_tokens=64, max_seconds=60.0, await_seconds=5.0
)
CALL, ANSWER = "<python>12+3</python>", "<answer>15</answer>"


def run(env: ScriptedEnv, client: ScriptedClient, **options) -> Episode:
  limits = dataclasses.replace(LIMITS, **options.pop("limits", {}))
  return asyncio.run(run_episode(env, task(), client, CHAT, limits, **options))


def test_two_turns_token_by_token():
  env = ScriptedEnv([tool("15", 0.25, calls=1), done(1.0, calls=1)])
  client = says(CALL, ANSWER)
  sampling = Sampling(1, temperature=0.5)
  result = run(env, client, sampling=sampling, key=(3, 4), sample=2, attempt=1, episode_id="e")
  (row,) = result.trajectories
  session = client.sessions[0]
  prompt, observation = session.extended
  first, second = session.sampled
  assert row.tokens.tolist() == prompt + first + observation + second
  expected = [0] * len(prompt) + [1] * len(first) + [0] * len(observation) + [1] * len(second)
  assert row.action_mask.tolist() == [bool(x) for x in expected]
  assert CHAT.decode(row.tokens[row.action_mask]) == CALL + ANSWER + "<eos>"
  assert CHAT.decode(row.tokens[~row.action_mask]) == "12+3=<output>15</output>"
  at = len(prompt) + len(first) - 1
  assert {int(i): float(row.rewards[i]) for i in np.flatnonzero(row.rewards)} == {
    at: 0.25,
    len(row.tokens) - 1: 1.0,
  }
  actions = row.action_mask
  assert (row.policy_version[actions] == 0).all()
  assert (row.policy_version[~actions] == -1).all()
  assert (row.temperature == np.where(actions, 0.5, 1.0)).all()
  assert (row.rollout_logprobs[~actions] == 0).all()
  np.testing.assert_array_equal(
    row.rollout_logprobs[actions],
    np.concatenate([-np.arange(1, len(s) + 1, dtype=np.float32) / 64 for s in (first, second)]),
  )
  assert all(s.key == (3, 4) and s.stop_ids == CHAT.stop_ids for s in session.samplings)
  assert env.replies == [CALL, ANSWER]
  assert (result.status, result.reward, row.truncated) == ("done", 1.25, False)
  assert (result.episode_id, result.sort_key, result.attempt) == ("e", (0, 2), 1)
  assert result.metrics["calls"] == 2
  assert result.metrics["turns"] == 2
  assert (env.closed, session.closed) == (1, 1)


def test_single_token_reply_is_one_action_with_its_reward():
  result = run(ScriptedEnv([done(1.0)]), says(""))
  (row,) = result.trajectories
  assert row.tokens[-1] == CHAT.eos_id
  assert row.action_mask.tolist() == [False] * 5 + [True]
  assert row.rewards.tolist() == [0, 0, 0, 0, 0, 1]


def test_turns_draw_on_one_budget_and_never_get_a_fresh_one():
  client = says(CALL)  # 6 tokens a turn after a prompt of 5, observations of 4
  env = ScriptedEnv([tool("15")] * 9)
  result = run(env, client, limits={"max_tokens": 28, "max_turn_tokens": 8, "max_turns": 9})
  assert [s.max_new_tokens for s in client.sessions[0].samplings] == [8, 8, 3]
  (row,) = result.trajectories
  assert len(row.tokens) == 28
  assert row.action_mask[-3:].all()
  assert (result.status, row.truncated) == ("truncated", True)
  assert env.replies == [CALL, CALL, "<python>12"]  # the cut reply was offered for grading
  assert result.metrics["turns"] == 3


def test_a_cut_last_reply_is_graded_and_truncated():
  env = ScriptedEnv([done(0.5)])
  result = run(env, says(ANSWER), limits={"max_tokens": 8})
  (row,) = result.trajectories
  assert env.replies == ["<answer>15"]
  assert (result.status, result.reward, row.truncated) == ("truncated", 0.5, True)
  assert row.rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5]


def test_a_cut_turn_within_the_budget_is_closed_by_the_observation():
  env = ScriptedEnv([tool("7"), done(1.0)])
  client = says(CALL, ANSWER)
  result = run(env, client, limits={"max_turn_tokens": 5})
  assert client.sessions[0].extended[1][0] == CHAT.eos_id
  (row,) = result.trajectories
  text = CHAT.decode(row.tokens[row.action_mask])
  assert text == "<python>12+3" + ANSWER + "<eos>"
  assert result.status == "done"


@pytest.mark.parametrize(
  ("max_tokens", "size"),
  [(15, 15), (14, 11), (16, 16)],  # prompt 5, reply 6, observation 4: fits exactly, not, leaves one
)
def test_an_observation_is_kept_only_if_it_fits(max_tokens, size):
  env = ScriptedEnv([tool("15", 0.5), done(0.0)])
  result = run(env, says(CALL, ANSWER), limits={"max_tokens": max_tokens})
  (row,) = result.trajectories
  assert len(row.tokens) == size
  assert row.rewards[10] == 0.5  # the last action before the observation, whatever comes after it
  assert row.rewards.sum() == 0.5
  assert result.status == "truncated"


def test_turns_and_seconds_truncate():
  result = run(ScriptedEnv([tool("1", 0.5)] * 2), says(CALL), limits={"max_turns": 2})
  assert (result.status, result.metrics["turns"], result.reward) == ("truncated", 2, 1.0)
  assert not result.trajectories[0].action_mask[-1]  # ends on the observation, for the bootstrap

  async def slow() -> Step:
    await asyncio.sleep(0.05)
    return tool("1")

  result = run(ScriptedEnv([slow] * 4), says(CALL), limits={"max_seconds": 0.02})
  assert (result.status, result.metrics["turns"]) == ("truncated", 1)


@pytest.mark.parametrize("where", ["env", "engine", "env hangs", "engine hangs", "engine cancels"])
def test_infrastructure_failures_propagate_and_close_everything(where):
  async def reply(session, sampling):
    if where == "engine":
      raise EngineFailure("gone")
    if where == "engine cancels":
      raise asyncio.CancelledError
    if where == "engine hangs":
      await asyncio.Event().wait()
    return completion(CHAT.encode_reply(CALL), sampling)

  steps = {"env": EnvFailure("sandbox broke"), "env hangs": forever}
  env, client = ScriptedEnv([steps.get(where, done(1.0))]), ScriptedClient(reply)
  expected, match = {
    "env": (EnvFailure, "sandbox broke"),
    "engine": (EngineFailure, "gone"),
    "engine cancels": (EngineFailure, r"cancelled by the other side: episode 0.0.0 \(task t0\)"),
    "env hangs": (EpisodeStalled, r"0.05 s: episode 0.0.0 \(task t0\), turn 1, .*'env step'"),
    "engine hangs": (EpisodeStalled, r"0.05 s: episode 0.0.0 \(task t0\), turn 1, .*'sample'"),
  }[where]
  with pytest.raises(expected, match=match):
    run(env, client, limits={"await_seconds": 0.05})
  assert env.closed == 1
  assert client.sessions[0].closed == 1


def test_an_await_that_ignores_its_cancellation_is_given_up(monkeypatch):
  monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.05)
  release = asyncio.Event()

  async def stubborn() -> Step:
    while not release.is_set():
      try:
        await release.wait()
      except asyncio.CancelledError:
        continue
    return done(1.0)

  async def main() -> None:
    limits = dataclasses.replace(LIMITS, await_seconds=0.05)
    with pytest.raises(EpisodeStalled):
      await run_episode(ScriptedEnv([stubborn]), task(), says(CALL), CHAT, limits)
    release.set()
    await asyncio.sleep(0)

  asyncio.run(main())


def pooled(pool: WorkerPool, work) -> ScriptedEnv:
  async def step() -> Step:
    await pool.submit(work).result()
    return done(1.0)

  return ScriptedEnv([step])


async def together(envs: list[ScriptedEnv], limits: EpisodeLimits) -> list:
  runs = [run_episode(env, task(), says(CALL), CHAT, limits) for env in envs]
  return await asyncio.gather(*runs, return_exceptions=True)


def test_waiting_in_line_for_a_shared_worker_is_no_stall_and_no_truncation():
  limits = dataclasses.replace(LIMITS, await_seconds=1.0, max_seconds=1.0)
  pool = WorkerPool(1, "test")
  envs = [pooled(pool, lambda beat: time.sleep(0.15)) for _ in range(10)]

  async def late() -> Step:  # then another turn, which the time in line must not have used up
    await pool.submit(lambda beat: None).result()
    return tool("1")

  envs += [ScriptedEnv([late, done(1.0)]), ScriptedEnv([forever])]
  *served, patient, hung = asyncio.run(together(envs, limits))
  pool.close()
  assert [e.reward for e in served] == [1.0] * 10
  assert (patient.status, patient.metrics["turns"]) == ("done", 2)
  assert isinstance(hung, EpisodeStalled)  # others' progress is none of an env that uses no pool


def test_one_hung_worker_stalls_its_own_episode_and_all_hung_stall_everyone():
  limits = dataclasses.replace(LIMITS, await_seconds=0.8)
  release = threading.Event()
  pool = WorkerPool(2, "test")
  hang = lambda beat: release.wait(30)  # noqa: E731
  envs = [pooled(pool, hang)] + [pooled(pool, lambda beat: time.sleep(0.15)) for _ in range(8)]
  hung, *served = asyncio.run(together(envs, limits))
  assert isinstance(hung, EpisodeStalled)
  assert [e.reward for e in served] == [1.0] * 8

  began = time.monotonic()
  stalled = asyncio.run(together([pooled(pool, hang) for _ in range(5)], limits))
  assert all(isinstance(e, EpisodeStalled) for e in stalled)
  assert time.monotonic() - began < 5
  release.set()
  pool.close()


def test_work_that_vouches_for_itself_may_exceed_the_deadline():
  limits = dataclasses.replace(LIMITS, await_seconds=0.5)

  def work(beat) -> None:
    for _ in range(16):
      beat()
      time.sleep(0.05)

  pool = WorkerPool(1, "test")
  (result,) = asyncio.run(together([pooled(pool, work)], limits))
  pool.close()
  assert result.reward == 1.0


def test_cancelling_an_episode_closes_it():
  env, client = ScriptedEnv([forever]), says(CALL)
  progress = Progress("e", "t0")

  async def main() -> None:
    job = asyncio.create_task(
      run_episode(env, task(), client, CHAT, LIMITS, episode_id="e", progress=progress)
    )
    while progress.event != "env step":
      await asyncio.sleep(0.001)
    assert (progress.turn, progress.action_tokens, progress.oldest_version) == (1, 6, 0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job

  asyncio.run(main())
  assert env.closed == 1
  assert client.sessions[0].closed == 1


@pytest.mark.parametrize("ticks", range(12))
def test_a_session_is_closed_whenever_the_cancellation_comes(ticks):
  client = says(CALL)

  async def main() -> None:
    job = asyncio.create_task(
      run_episode(ScriptedEnv([forever]), task(), client, CHAT, LIMITS, episode_id="e")
    )
    for _ in range(ticks):
      await asyncio.sleep(0)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
      await job
    assert [session.closed for session in client.sessions] == [1] * len(client.sessions)

  asyncio.run(main())


def test_rewards_that_cannot_be_placed_are_refused():
  with pytest.raises(RewardError, match="nan is not a finite number"):
    run(ScriptedEnv([done(float("nan"))]), says(ANSWER))
  builder = TrajectoryBuilder()
  builder.observe([1, 2])
  builder.reward(0.0)
  with pytest.raises(RewardError, match=r"reward 1.0 came before the first action"):
    builder.reward(1.0)
  with pytest.raises(ValueError, match="position 0"):
    TrajectoryBuilder().act(completion([1], Sampling(1)))


def test_two_rewards_for_one_action_add_up():
  builder = TrajectoryBuilder()
  builder.observe([1])
  builder.act(completion([2, 3], Sampling(2)))
  builder.observe([4])
  builder.reward(0.5)
  builder.reward(0.25)
  row = builder.finish(task_id="t", episode_id="e", group=0, truncated=False)
  assert row.rewards.tolist() == [0, 0, 0.75, 0]


def test_a_task_that_cannot_run_says_why():
  with pytest.raises(TaskRefused, match=r"has 5 tokens.*env.max_tokens = 5"):
    run(ScriptedEnv([done(1.0)]), says(ANSWER), limits={"max_tokens": 5})

  async def reply(session, sampling):
    raise BadRequest("prompt of 900 tokens, slot of 128")

  with pytest.raises(TaskRefused, match=r"task t0: prompt of 900 tokens, slot of 128"):
    run(ScriptedEnv([done(1.0)]), ScriptedClient(reply))


@pytest.mark.parametrize("defect", ["empty", "long", "nan", "ragged", "incarnations"])
def test_defective_completions_are_engine_failures(defect):
  async def reply(session, sampling):
    good = completion(CHAT.encode_reply(CALL), sampling)
    match defect:
      case "empty":
        return completion([], sampling)
      case "long":
        return completion(CHAT.encode_reply(CALL) * 9, Sampling(999))
      case "nan":
        return dataclasses.replace(good, logprobs=good.logprobs * np.float32("nan"))
      case "ragged":
        return dataclasses.replace(good, policy_version=good.policy_version[1:])
    return dataclasses.replace(good, incarnation=len(session.sampled))

  with pytest.raises(EngineFailure):
    run(ScriptedEnv([tool("1"), done(1.0)]), ScriptedClient(reply), limits={"max_turn_tokens": 16})


def test_sampling_keys_are_fixed_and_distinct():
  keys = {
    sampling_key(seed, serial, sample, attempt)
    for seed in (-1, 0, 1)
    for serial in (0, 1, 2**40)
    for sample in (0, 1)
    for attempt in (0, 1)
  }
  assert len(keys) == 36
  assert all(0 <= word < 2**32 for key in keys for word in key)
  assert sampling_key(0, 1, 0, 0) == (414276665, 4003915441)  # a change would end reproducibility


def test_limits_come_from_the_config():
  limits = EpisodeLimits.from_config(EnvConfig(max_turns=3), RolloutConfig(await_seconds=7.0))
  assert dataclasses.astuple(limits) == (3, 64, 64, 60.0, 7.0)


def test_closing_that_fails_does_not_undo_an_episode(caplog):
  class Broken(ScriptedEnv):
    async def close(self) -> None:
      raise OSError("already gone")

  result = run(Broken([done(1.0)]), says(ANSWER))
  assert result.reward == 1.0
  assert "closing the environment of episode 0.0.0 failed" in caplog.text


def test_prompts_may_hold_several_messages():
  class Long(ScriptedEnv):
    async def reset(self, task):
      return [Message(role="system", content="add"), *task.prompt]

  result = run(Long([done(1.0)]), says(ANSWER))
  row = result.trajectories[0]
  assert CHAT.decode(row.tokens[~row.action_mask]) == "add\n12+3="
