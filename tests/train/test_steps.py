"""The jitted steps on a tiny real model: averages, masks, freezing, skipping, micro-batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import config as c
from sao_jax.data.packing import BatchSpec, pack
from sao_jax.models.transformer import init_params
from sao_jax.train.estimates import bootstrapped_rewards, make_estimate
from sao_jax.train.state import make_state
from sao_jax.train.steps import (
  make_critic_step,
  make_logprobs,
  make_policy_step,
  make_sft_step,
  token_weights,
)
from sao_jax.types import Episode, Trajectory, Version

MODEL = c.ModelConfig(
  vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16,
  num_experts=2, experts_per_token=1,
)  # fmt: skip


def make_config(**changes) -> c.Config:
  base = c.Config(
    num_steps=20,
    batch_size=8,
    model=MODEL,
    env=c.EnvConfig(max_tokens=24),
    rollout=c.RolloutConfig(max_len=24, max_staleness=1),
    policy=c.PolicyConfig(lr=1e-2),
    critic=c.CriticConfig(lr=1e-2, warmup_steps=0),
    packing=c.PackingConfig(lengths=(24,), max_segments=1),
  )
  return dataclasses.replace(base, **changes)


def episode(index: int, rng, *, version=0, truncated=False, ends_on_observation=False) -> Episode:
  """prompt 4, action 5, observation 3, action 4 (or less), reward on the last action."""
  parts = [(4, False), (5, True), (3, False)] + ([] if ends_on_observation else [(4, True)])
  mask = np.concatenate([np.full(n, action) for n, action in parts])
  n = len(mask)
  rewards = np.zeros(n, np.float32)
  rewards[np.flatnonzero(mask)[-1]] = reward = float(index % 2)
  trajectory = Trajectory(
    task_id=str(index),
    episode_id=str(index),
    segment=0,
    group=index,
    tokens=rng.integers(1, 32, n).astype(np.int32),
    action_mask=mask,
    rollout_logprobs=np.where(mask, -3.4, 0).astype(np.float32),
    policy_version=np.where(mask, version, -1).astype(np.int32),
    temperature=np.where(mask, 0.7, 1.0).astype(np.float32),
    rewards=rewards,
    truncated=truncated,
  )
  status = "truncated" if truncated else "done"
  return Episode(str(index), index, 0, 0, index, (trajectory,), status, reward)


def make_batch(config, step=0, episodes=None, **kwargs):
  rng = np.random.default_rng(0)
  if episodes is None:
    episodes = [episode(i, rng, **kwargs) for i in range(config.batch_size)]
  return jax.device_put(pack(episodes, Version(0, step), config)[0])


def policy_parts(config):
  graphdef, params = init_params(config.model, 0, "policy")
  state, optimizer = make_state(params, config.policy, config.num_steps)
  return graphdef, state, make_policy_step(config, graphdef, optimizer)


def critic_parts(config):
  graphdef, params = init_params(config.model, 1, "critic")
  state, optimizer = make_state(
    params, config.critic, config.num_steps, config.critic.trainable, config.critic.updates_per_step
  )
  return graphdef, state, make_critic_step(graphdef, optimizer, config.critic.micro_batches)


def copied(tree):
  return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def leaves_equal(a, b) -> bool:
  return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def max_difference(a, b) -> float:
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return max(float(jnp.abs(x - y).max()) for x, y in pairs)


def test_the_first_step_has_the_losses_of_a_hand_computation():
  config = make_config()
  graphdef, state, policy_step = policy_parts(config)
  critic_def, critic, critic_step = critic_parts(config)
  batch = make_batch(config)
  estimates, metrics = make_estimate(config, critic_def)(critic.params, batch)
  # a fresh value head is 0: the target is the return, and every advantage is λ-discounted return
  mask = np.asarray(batch.action_mask)
  returns = np.where(mask, np.arange(8)[:, None] % 2, 0.0)
  np.testing.assert_allclose(estimates.returns, returns, atol=1e-6)
  lambda_ = 1 - 1 / (1.5 * 9)
  to_go = np.where(mask, 8 - (np.cumsum(mask, 1) - 1), 0)
  np.testing.assert_allclose(estimates.advantages, returns * lambda_**to_go, rtol=1e-5)
  assert metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)  # constant V

  logprobs = np.asarray(make_logprobs(graphdef)(state.params, batch), np.float64)
  ratio = np.exp(logprobs + 3.4)
  keep = mask & (ratio > 0.7) & (ratio < 6.0)
  loss = (
    -(np.where(keep, ratio, 0) * np.asarray(estimates.advantages) * logprobs).sum() / mask.sum()
  )
  _, policy_metrics = policy_step(state, batch, estimates)
  assert policy_metrics["policy/loss"] == pytest.approx(loss, rel=1e-4)
  assert policy_metrics["loss/masked"] == pytest.approx(1 - keep.sum() / mask.sum(), abs=1e-6)
  assert policy_metrics["policy/trained_tokens"] == 8 * 9
  _, critic_metrics = critic_step(critic, batch, estimates.returns)
  assert critic_metrics["critic/loss"] == pytest.approx(0.5, rel=1e-6)  # half the returns are 1


@pytest.mark.parametrize("average", ["token", "episode"])
def test_micro_batches_do_not_change_the_update(average):
  whole = make_config(loss=c.LossConfig(average=average))
  split = dataclasses.replace(
    whole,
    policy=dataclasses.replace(whole.policy, micro_batches=4),
    critic=dataclasses.replace(whole.critic, micro_batches=2),
  )
  rng = np.random.default_rng(0)
  rows = [episode(i, rng, ends_on_observation=i % 3 == 0) for i in range(8)]
  results = []
  for config in (whole, split):
    _, state, policy_step = policy_parts(config)
    critic_def, critic, critic_step = critic_parts(config)
    batch = make_batch(config, episodes=rows)
    estimates, _ = make_estimate(config, critic_def)(critic.params, batch)
    critic, critic_metrics = critic_step(critic, batch, estimates.returns)
    state, metrics = policy_step(state, batch, estimates)
    norms = metrics["policy/grad_norm"], critic_metrics["critic/grad_norm"]
    results.append((state.params, critic.params, norms, metrics["policy/loss"]))
  (policy, critic, norms, loss), (policy_, critic_, norms_, loss_) = results
  np.testing.assert_allclose(norms, norms_, rtol=1e-5)
  np.testing.assert_allclose(loss, loss_, rtol=1e-5)
  # Adam's first step is ±lr: compare where the gradient is not numerically zero
  assert max_difference(critic, critic_) < 2e-3
  assert max_difference(policy, policy_) < 2e-3


def test_token_and_episode_averages_by_hand():
  config = make_config()
  rng = np.random.default_rng(0)
  rows = [episode(i, rng, ends_on_observation=i < 4) for i in range(8)]  # 5 or 9 action tokens
  batch = make_batch(config, episodes=rows)
  token = np.asarray(token_weights(batch.loss_mask, batch, "token"))
  per_episode = np.asarray(token_weights(batch.loss_mask, batch, "episode"))
  assert token.sum() == pytest.approx(1)
  assert per_episode.sum() == pytest.approx(1)
  np.testing.assert_allclose(token[0, 4:9], 1 / (4 * 5 + 4 * 9), rtol=1e-6)
  np.testing.assert_allclose(per_episode[0, 4:9], 1 / 8 / 5, rtol=1e-6)
  np.testing.assert_allclose(per_episode[7, 4:9], 1 / 8 / 9, rtol=1e-6)


def test_stale_tokens_leave_the_loss_but_change_no_advantage():
  config = make_config()
  critic_def, critic, _ = critic_parts(config)
  params = jax.tree.map(lambda x: x + 0.1, critic.params)  # a critic that says something
  estimate = make_estimate(config, critic_def)
  fresh, stale = make_batch(config, step=1), make_batch(config, step=9)
  assert fresh.loss_mask.sum() == 8 * 9
  assert stale.loss_mask.sum() == 0
  a, b = estimate(params, fresh)[0], estimate(params, stale)[0]
  assert np.abs(a.advantages).max() > 0
  assert leaves_equal(a, b)


def test_a_batch_without_trainable_tokens_updates_nothing_and_is_counted():
  config = make_config()
  _, state, policy_step = policy_parts(config)
  critic_def, critic, _ = critic_parts(config)
  batch = make_batch(config, step=9)
  estimates, _ = make_estimate(config, critic_def)(critic.params, batch)
  before = copied(state)
  state, metrics = policy_step(state, batch, estimates)
  assert leaves_equal(before, state)
  assert metrics["policy/loss"] == 0
  assert metrics["policy/skipped"] == 1
  assert metrics["policy/nonfinite"] == 0


def test_padding_only_batches_are_finite_for_every_stage():
  config = make_config()
  batch = jax.device_put(BatchSpec.from_config(config).zeros(24))
  graphdef, state, policy_step = policy_parts(config)
  critic_def, critic, critic_step = critic_parts(config)
  estimates, metrics = make_estimate(config, critic_def)(critic.params, batch)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((estimates, metrics)))
  before = copied((state, critic))
  sft_state, optimizer = make_state(copied(state.params), config.sft, 10)
  sft_step = make_sft_step(graphdef, optimizer)
  sft_state, sft_metrics = sft_step(sft_state, batch)
  state, policy_metrics = policy_step(state, batch, estimates)
  critic, critic_metrics = critic_step(critic, batch, estimates.returns)
  assert leaves_equal(before, (state, critic))
  assert leaves_equal(before[0].params, sft_state.params)
  for name, metrics in (
    ("policy", policy_metrics),
    ("critic", critic_metrics),
    ("sft", sft_metrics),
  ):
    assert metrics[f"{name}/loss"] == 0
    assert metrics[f"{name}/skipped"] == 1


def test_a_non_finite_gradient_is_rejected_and_reported():
  config = make_config()
  _, state, policy_step = policy_parts(config)
  critic_def, critic, critic_step = critic_parts(config)
  batch = make_batch(config)
  estimates, _ = make_estimate(config, critic_def)(critic.params, batch)
  bad = dataclasses.replace(estimates, advantages=estimates.advantages.at[0, 5].set(jnp.nan))
  before = copied((state, critic))
  state, metrics = policy_step(state, batch, bad)
  critic, critic_metrics = critic_step(critic, batch, estimates.returns.at[1, 5].set(jnp.inf))
  assert leaves_equal(before, (state, critic))
  assert metrics["policy/nonfinite"] == 1
  assert critic_metrics["critic/nonfinite"] == 1


def test_nan_on_padding_and_observations_does_not_get_out():
  config = make_config()
  _, state, policy_step = policy_parts(config)
  critic_def, critic, _ = critic_parts(config)
  batch = make_batch(config)
  estimates, _ = make_estimate(config, critic_def)(critic.params, batch)

  def poison(x):
    return jnp.where(batch.action_mask, x, jnp.nan)

  spoiled = jax.tree.map(poison, estimates)
  clean, metrics = policy_step(copied(state), batch, estimates)
  dirty, dirty_metrics = policy_step(state, batch, spoiled)
  assert leaves_equal(clean, dirty)
  assert metrics["policy/loss"] == dirty_metrics["policy/loss"]


def test_attention_of_the_critic_is_bit_equal_after_twenty_steps_with_weight_decay():
  config = make_config()
  config.critic.weight_decay = 0.1
  critic_def, critic, critic_step = critic_parts(config)
  before = copied(critic.params)
  batch = make_batch(config)
  estimates, _ = make_estimate(config, critic_def)(critic.params, batch)
  for _ in range(20):
    critic, metrics = critic_step(critic, batch, estimates.returns)
  moved = {
    jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    for (path, a), b in zip(
      jax.tree_util.tree_flatten_with_path(before)[0], jax.tree.leaves(critic.params), strict=True
    )
    if not np.array_equal(a, b)
  }
  assert moved == {
    "layers/ffn/w_gate_up", "layers/ffn/w_down", "value_head/kernel", "value_head/bias",
  }  # fmt: skip
  assert metrics["critic/loss"] < 0.3  # from 0.5: it learns through the leaves that are live


def test_bootstrap_adds_the_value_after_the_last_token_to_the_last_action():
  config = make_config(rollout=c.RolloutConfig(max_len=24, truncation="bootstrap"))
  config.advantage.gamma = 0.9
  rng = np.random.default_rng(0)
  rows = [episode(i, rng, truncated=i < 2, ends_on_observation=i in (1, 2)) for i in range(8)]
  batch = make_batch(config, episodes=rows)
  next_values = jnp.asarray(rng.normal(size=batch.tokens.shape), jnp.float32)
  rewards = np.asarray(bootstrapped_rewards(batch, next_values, 0.9))
  expected = np.asarray(batch.rewards).copy()
  expected[0, 15] += 0.9 * float(next_values[0, 15])  # ends on its last action
  expected[1, 8] += 0.9 * float(next_values[1, 11])  # ends on an observation: V after all of it
  np.testing.assert_allclose(rewards, expected, rtol=1e-6)


def test_sft_learns_a_batch_and_only_its_loss_mask_counts():
  config = make_config()
  graphdef, params = init_params(config.model, 0, "policy")
  state, optimizer = make_state(params, c.SftConfig(lr=1e-2, warmup_steps=0, steps=60), 60)
  step = make_sft_step(graphdef, optimizer, aux_weight=1e-3)
  batch = make_batch(config)
  state, first = step(state, batch)
  for _ in range(59):
    state, last = step(state, batch)
  assert first["sft/loss"] > np.log(32)  # an untrained model is no better than a guess
  assert last["sft/loss"] < 0.5 * first["sft/loss"]
