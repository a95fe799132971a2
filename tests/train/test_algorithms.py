"""The rows of the papers' tables as settings: advantages by hand, identities, what is kept."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import config as c
from sao_jax.checks import check
from sao_jax.config import ConfigError
from sao_jax.data.packing import pack
from sao_jax.train.anchor import Anchor
from sao_jax.train.baselines import RunningMeans
from sao_jax.train.checkpoint import Checkpoints
from sao_jax.train.estimates import make_estimate, value_tokens
from sao_jax.train.state import load_policy, make_critic
from sao_jax.train.steps import make_logprobs, policy_loss, positive_weights
from sao_jax.train.updates import LoopSteps
from sao_jax.types import Version
from tests.train.test_steps import episode, make_config

REPLACE = dataclasses.replace


def episodes_of(rewards, groups=None, **kwargs):
  """One trajectory each: prompt 4, action 5, observation 3, action 4; reward on its last action."""
  rng = np.random.default_rng(0)
  found = []
  for i, reward in enumerate(rewards):
    one = episode(i, rng, **kwargs)
    trajectory = one.trajectories[0]
    trajectory.rewards[np.flatnonzero(trajectory.action_mask)[-1]] = reward
    group = i if groups is None else groups[i]
    found.append(REPLACE(one, group=group, reward=float(reward)))
  return found


def without_critic(name, **changes):
  return make_config(
    advantage=c.AdvantageConfig(name=name, **changes),
    critic=c.CriticConfig(enabled=False),
    group_size=4 if name == "group" else 1,
  )


def advantages(config, batch):
  estimates, _ = make_estimate(config, None)(None, jax.device_put(batch))
  table = np.asarray(estimates.advantages)
  assert (table[~np.asarray(batch.action_mask)] == 0).all()
  per_row = [
    set(np.round(row[mask], 5)) for row, mask in zip(table, batch.action_mask, strict=True)
  ]
  assert all(len(values) == 1 for values in per_row)  # all actions of a trajectory alike
  return np.array([values.pop() for values in per_row])


# --- Advantages ---


@pytest.mark.parametrize("scale", ["std", "none"])
def test_group_advantages_by_hand(scale):
  rewards, groups = [1, 0, 0, 0, 1, 1, 0, 0], [7, 7, 7, 7, 3, 3, 3, 3]
  config = without_critic("group", group_scale=scale)
  batch, _ = pack(episodes_of(rewards, groups), Version(0, 0), config)
  found = advantages(config, batch)
  centred = np.array([0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5])
  deviation = np.array([np.sqrt(0.1875)] * 4 + [0.5] * 4) if scale == "std" else 1.0
  np.testing.assert_allclose(found, centred / deviation, rtol=1e-4)


def test_running_means_by_hand():
  """Window 2 per prompt: unseen falls back to the run, nothing at all to the return itself."""
  config = without_critic("running_mean", window=2)
  means = RunningMeans(config.advantage)

  def step(rewards):
    found = [
      REPLACE(e, trajectories=tuple(REPLACE(t, task_id=p) for t in e.trajectories))
      for e, p in zip(episodes_of(rewards), "aabbcdef", strict=True)
    ]
    batch, _ = pack(found, Version(0, 0), config)
    batch = means(batch, found)
    return np.asarray(batch.baseline), advantages(config, batch)

  first, advantage = step([1, 0, 0, 0, 1, 1, 1, 0])
  np.testing.assert_allclose(first, [1, 0, 0, 0, 1, 1, 1, 0])  # nothing earlier
  np.testing.assert_allclose(advantage, 0)
  second, advantage = step([1, 1, 1, 0, 0, 0, 0, 0])
  np.testing.assert_allclose(second, [0.5, 0.5, 0, 0, 1, 1, 1, 0])
  np.testing.assert_allclose(advantage, [0.5, 0.5, 1, 0, -1, -1, -1, 0])
  third, _ = step([0] * 8)
  np.testing.assert_allclose(third, [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0])
  again = RunningMeans(config.advantage, means.state())
  assert again.state() == means.state()
  np.testing.assert_allclose(means.state()["run"], [0, 0])


def test_a_prompt_that_was_never_seen_has_the_mean_of_the_run():
  config = without_critic("running_mean", window=4)
  means = RunningMeans(config.advantage)
  found = episodes_of([1, 1, 0, 1, 1, 1, 0, 1])
  means(pack(found, Version(0, 0), config)[0], found)
  new = [
    REPLACE(e, trajectories=tuple(REPLACE(t, task_id=f"new {t.task_id}") for t in e.trajectories))
    for e in found
  ]
  batch = means(pack(new, Version(0, 0), config)[0], new)
  np.testing.assert_allclose(batch.baseline, 0.75)  # of the last four: 1 1 0 1


def test_a_window_of_the_run_is_everybodys_baseline():
  config = without_critic("running_mean", window=128, window_per="run")
  means = RunningMeans(config.advantage)
  found = episodes_of([1, 1, 0, 1, 1, 1, 0, 1])
  means(pack(found, Version(0, 0), config)[0], found)
  batch = means(pack(found, Version(0, 0), config)[0], found)
  np.testing.assert_allclose(batch.baseline, 0.75)
  assert means.state()["prompts"] == {}


@pytest.mark.parametrize("level", ["step_last", "step_mean"])
def test_step_level_by_hand(level):
  """Two turns of 5 and 4 tokens; λ of two turns is 1 − 1/3: Â_2 = R − V_2, Â_1 = V_2 − V_1 + λÂ_2."""
  config = make_config(advantage=c.AdvantageConfig(level=level))
  policy = load_policy(REPLACE(config, model=REPLACE(config.model, vocab_size=64)))
  critic_def, critic = make_critic(policy)
  batch = jax.device_put(pack(episodes_of([1, 0] * 4), Version(0, 0), config)[0])
  estimates, _ = make_estimate(config, critic_def)(critic, batch)
  for i, reward in enumerate([1.0, 0.0] * 4):
    values, found = np.asarray(estimates.values[i]), np.asarray(estimates.advantages[i])
    pick = (lambda x: x[-1]) if level == "step_last" else np.mean
    v1, v2 = pick(values[4:9]), pick(values[12:16])
    second = reward - v2
    first = v2 - v1 + (1 - 1 / 3) * second
    np.testing.assert_allclose(found[4:9], first, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[12:16], second, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
      np.asarray(estimates.returns[i])[batch.action_mask[i]], reward, atol=1e-6
    )
  trained = np.asarray(value_tokens(config.advantage, batch).value_mask)
  expected = [8, 15] if level == "step_last" else [*range(4, 9), *range(12, 16)]
  assert all(np.flatnonzero(row).tolist() == expected for row in trained)


# --- Losses ---


def test_positive_nll_counts_good_trajectories_only():
  """Loss with weight .1 minus loss without: −.1 · mean log π over tokens of return above 0."""
  config = make_config()
  batch = jax.device_put(pack(episodes_of([1, 0, 0, 1, 0, 0, 0, 0]), Version(0, 0), config)[0])
  weights = positive_weights(batch, config.loss)
  good = np.zeros(len(batch.tokens), bool)
  good[[0, 3]] = True
  mask = np.asarray(batch.loss_mask)
  np.testing.assert_allclose(weights, mask * good[:, None] / mask[good].sum(), rtol=1e-6)
  logprobs = jnp.linspace(-3, -1, weights.size)
  extras = {
    "rollout_logprobs": logprobs,
    "anchor_logprobs": logprobs,
    "advantages": jnp.ones(weights.size),
    "staleness": jnp.zeros(weights.size, jnp.int32),
    "weights": jnp.ones(weights.size),
    "positive_weights": weights.ravel(),
  }
  clip = c.LossConfig(name="ppo", eps_low=0.2, eps_high=0.28)
  plain, _ = policy_loss(clip)(logprobs, extras)
  vapo, _ = policy_loss(REPLACE(clip, positive_nll=0.1))(logprobs, extras)
  expected = -0.1 * np.asarray(logprobs).reshape(weights.shape)[mask & good[:, None]].mean()
  np.testing.assert_allclose((vapo - plain).sum(), expected, rtol=1e-4)


def loop(config, **kwargs):
  policy = load_policy(config)
  critic = make_critic(policy) if config.critic.enabled else (None, None)
  return LoopSteps(config, policy, *critic, lambda _: None)


def with_loss(tmp=None, **loss):
  config = make_config(loss=c.LossConfig(**loss), name="t")
  # Where a gradient is 0 in theory (the router's, of one expert a token), Adam would make steps of
  # lr out of its rounding.
  config = REPLACE(config, policy=REPLACE(config.policy, eps=1e-5))
  return check(REPLACE(config, model=REPLACE(config.model, vocab_size=64)))


def trained(config, count=3, steps=None):
  steps = steps or loop(config)
  for version in range(count):
    batch = pack(episodes_of([1, 0, 0, 1, 1, 0, 1, 0]), Version(0, version), config)[0]
    metrics = jax.device_get(steps(batch, version))
    assert not metrics["policy/nonfinite"]
  return steps, metrics


def same_params(a, b, **kwargs):
  for x, y in zip(jax.tree.leaves(a.policy.params), jax.tree.leaves(b.policy.params), strict=True):
    np.testing.assert_allclose(x, y, **kwargs)


BAND = {"eps_low": 0.2, "eps_high": 0.28}


def test_reuse_is_recompute_with_one_minibatch():
  reuse, _ = trained(with_loss(name="decoupled_ppo", prox="reuse", **BAND))
  recompute, metrics = trained(with_loss(name="decoupled_ppo", prox="recompute", **BAND))
  same_params(reuse, recompute, rtol=1e-5, atol=1e-6)
  assert metrics["time/prox"] > 0
  two = REPLACE(reuse.config, policy=REPLACE(reuse.config.policy, minibatches=2))
  with pytest.raises(ConfigError, match="reuse"):
    check(two)


def test_decoupled_with_the_rollout_as_prox_is_ppo():
  ppo, _ = trained(with_loss(name="ppo", **BAND))
  decoupled, metrics = trained(with_loss(name="decoupled_ppo", **BAND))
  same_params(ppo, decoupled, rtol=1e-5, atol=1e-6)
  assert "time/prox" not in metrics


def test_a3po_at_staleness_one_is_ppo_against_the_rollout():
  configs = with_loss(name="ppo", **BAND), with_loss(name="a3po", **BAND)
  results = []
  for config in configs:
    steps = loop(config)
    for version in range(1, 4):
      found = episodes_of([1, 0, 0, 1, 1, 0, 1, 0], version=version - 1)
      steps(pack(found, Version(0, version), config)[0], version)
    results.append(steps)
  same_params(*results, rtol=1e-5, atol=1e-6)


def test_the_anchor_follows_as_asked():
  """ewma: ½ old + ½ new after every step; snapshot: the weights of versions 2, 4, …"""
  config = with_loss(name="decoupled_ppo", prox="ewma", prox_decay=0.5, **BAND)
  policy = load_policy(config)
  batch = jax.device_put(pack(episodes_of([1, 0] * 4), Version(0, 0), config)[0])
  estimates, _ = make_estimate(config, None)(None, batch)
  twice = jax.tree.map(lambda x: 2 * x, policy.params)
  anchor = Anchor(config.loss, policy.graphdef, policy.params)
  anchor.follow(twice, 1)
  expected = jax.tree.map(lambda x: 1.5 * x, policy.params)
  for x, y in zip(jax.tree.leaves(anchor.params), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6)
  found, _ = anchor(twice, batch, estimates)
  by_hand = make_logprobs(policy.graphdef)(expected, batch)
  np.testing.assert_allclose(found.anchor_logprobs, by_hand, rtol=1e-6)
  stored = Anchor(
    REPLACE(config.loss, prox="snapshot", prox_every=2), policy.graphdef, policy.params
  )
  stored.follow(twice, 1)
  np.testing.assert_array_equal(
    jax.tree.leaves(stored.params)[0], jax.tree.leaves(policy.params)[0]
  )
  stored.follow(twice, 2)
  np.testing.assert_array_equal(jax.tree.leaves(stored.params)[0], jax.tree.leaves(twice)[0])


def test_the_time_of_the_anchor_is_that_of_its_own_forward():
  """Critic updates that were dispatched before it are still running."""
  config = with_loss(name="decoupled_ppo", prox="recompute", **BAND)
  policy = load_policy(config)
  batch = jax.device_put(pack(episodes_of([1, 0] * 4), Version(0, 0), config)[0])
  estimates, _ = make_estimate(config, None)(None, batch)
  anchor = Anchor(config.loss, policy.graphdef, policy.params)
  anchor(policy.params, batch, estimates)  # compiles

  def slow(x):
    time.sleep(0.8)
    return x

  updates = jax.jit(lambda x: jax.pure_callback(slow, x, x))
  x = np.zeros(3, np.float32)
  updates(x).block_until_ready()
  start = time.perf_counter()
  _, timed = anchor(policy.params, batch, estimates, after=updates(x))
  assert time.perf_counter() - start > 0.8 > 2 * timed["time/prox"]


@pytest.mark.parametrize("prox", ["ewma", "snapshot"])
def test_anchor_weights_are_saved_and_go_on_exactly(tmp_path, prox):
  config = with_loss(name="decoupled_ppo", prox=prox, prox_every=2, **BAND)
  batches = [pack(episodes_of([1, 0] * 4), Version(0, v), config)[0] for v in range(4)]
  whole = loop(config)
  whole.warm_up()
  for version, batch in enumerate(batches):
    if version == 2:
      with Checkpoints(tmp_path, config.checkpoint, 1) as checkpoints:
        checkpoints.save(2, whole.states(), {})
    whole(batch, version)
  resumed = loop(config)
  with Checkpoints(tmp_path, config.checkpoint, 1) as checkpoints:
    resumed.restore(checkpoints.restore(resumed.states()).trees)
  resumed.warm_up()
  for version in (2, 3):
    resumed(batches[version], version)
  one, two = jax.tree.leaves(whole.states()), jax.tree.leaves(resumed.states())
  for x, y in zip(one, two, strict=True):
    np.testing.assert_array_equal(x, y)


# --- Refusals ---


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"loss": c.LossConfig(prox="recompute")}, "loss.prox = 'recompute' has no effect"),
    ({"loss": c.LossConfig(name="icepop")}, "the article has 0.5 and 5"),
    ({"loss": c.LossConfig(min_behavior_weight=0.5)}, "only icepop"),
    ({"loss": c.LossConfig(max_behavior_weight=5.0)}, "behaviour weight"),
    ({"advantage": c.AdvantageConfig(name="group")}, "does without the critic"),
    ({"advantage": c.AdvantageConfig(level="step_last", skip_observations=False)}, "turns"),
    (
      {"advantage": c.AdvantageConfig(name="group"), "critic": c.CriticConfig(enabled=False)},
      "group_size = 1",
    ),
  ],
)
def test_settings_without_effect_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    check(make_config(**changes))
