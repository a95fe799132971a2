"""Estimates: values, advantages and targets of a batch, before any update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sao_jax.config import AdvantageConfig, Config
from sao_jax.kernels.advantages import (
  batched_skip_observation_gae,
  group_relative,
  length_adaptive_lambda,
  step_level_gae,
)
from sao_jax.kernels.stats import explained_variance, masked_mean, whitened
from sao_jax.models.transformer import token_values
from sao_jax.types import Batch, Estimates

Metrics = dict[str, jax.Array]


def per_token(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Gathers one value per trajectory "N" to its tokens "B T"; 0 on padding."""
  return jnp.where(segment_ids > 0, values[jnp.maximum(segment_ids - 1, 0)], 0)


def per_segment(x: jax.Array, segment_ids: jax.Array, num_segments: int) -> jax.Array:
  """Sums "B T" over each trajectory to "N"."""
  return jax.ops.segment_sum(x.ravel(), segment_ids.ravel(), num_segments + 1)[1:]


def bootstrapped_rewards(batch: Batch, next_values: jax.Array, gamma: float) -> jax.Array:
  """Adds γ·V(all tokens) of a bootstrapped truncated trajectory to its last action's reward.

  The discount there stays 0, so the result is exact for every λ, also when the trajectory ends on
  an observation or fills its row.
  """
  bonus = per_segment(gamma * next_values * batch.bootstrap, batch.segment_ids, len(batch.returns))
  last = batch.action_mask & (batch.discounts == 0)
  return batch.rewards + jnp.where(last, per_token(bonus, batch.segment_ids), 0.0)


def advantage_mask(batch: Batch, skip_observations: bool) -> jax.Array:
  """Tokens that advantages run over: the actions, or all from the first to the last action."""
  if skip_observations:
    return batch.action_mask
  segments = batch.segment_ids.ravel()
  size = len(batch.returns) + 1
  column = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1]), batch.tokens.shape)
  action = batch.action_mask
  first = jax.ops.segment_min(
    jnp.where(action, column, jnp.iinfo(jnp.int32).max).ravel(), segments, size
  )
  last = jax.ops.segment_max(jnp.where(action, column, -1).ravel(), segments, size)
  inside = (column >= first[batch.segment_ids]) & (column <= last[batch.segment_ids])
  return inside & (batch.segment_ids > 0)


def normalized(advantages: jax.Array, batch: Batch, config: AdvantageConfig) -> jax.Array:
  match config.normalize:
    case "none":
      return advantages
    case "batch":
      return whitened(advantages, batch.action_mask)
    case other:
      raise ValueError(f"advantage.normalize = {other!r}: choose one of none, batch")


def advantage_discounts(batch: Batch, mask: jax.Array, gamma: float) -> jax.Array:
  """γ on every token of ``mask`` but a trajectory's last action, where it is 0."""
  return jnp.where(mask & ~batch.action_mask, jnp.float32(gamma), batch.discounts)


def turn_ends(action_mask: jax.Array) -> jax.Array:
  """The last token "B T" of each turn, a maximal run of actions."""
  following = jnp.concatenate([action_mask[:, 1:], jnp.zeros_like(action_mask[:, :1])], axis=1)
  return action_mask & ~following


def value_tokens(config: AdvantageConfig, batch: Batch) -> Batch:
  """The batch with the tokens that the critic trains on: of each turn the last, with step_last."""
  if config.level != "step_last":
    return batch
  return dataclasses.replace(batch, value_mask=batch.value_mask & turn_ends(batch.action_mask))


def gae(config: AdvantageConfig, batch: Batch, values: jax.Array, rewards: jax.Array) -> jax.Array:
  """Generalised advantages by token, or by turn (``level``)."""
  mask = advantage_mask(batch, config.skip_observations)
  if config.lambda_ >= 0:
    lambda_ = jnp.full(batch.tokens.shape, config.lambda_, jnp.float32)
  else:
    steps = mask if config.level == "token" else turn_ends(batch.action_mask)
    length = per_segment(steps.astype(jnp.int32), batch.segment_ids, len(batch.returns))
    lambda_ = per_token(length_adaptive_lambda(length, config.alpha), batch.segment_ids)
  discounts = advantage_discounts(batch, mask, config.gamma)
  if config.level == "token":
    return batched_skip_observation_gae(rewards, values, discounts, mask, lambda_)
  by_turn = functools.partial(step_level_gae, reduce=config.level.removeprefix("step_"))
  return jax.vmap(by_turn)(rewards, values, discounts, mask, lambda_)


def episode_means(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Of each episode of the batch, "N" with room to spare: mean return, group, whether it is there."""
  size = len(batch.episode)
  index = jnp.where(batch.episode >= 0, batch.episode, size)
  count = jax.ops.segment_sum(jnp.ones(size), index, size + 1)[:-1]
  total = jax.ops.segment_sum(batch.returns, index, size + 1)[:-1]
  group = jax.ops.segment_max(batch.group, index, size + 1)[:-1]
  present = count > 0
  return total / jnp.maximum(count, 1.0), jnp.where(present, group, -1), present


def advantages_of(config: Config, batch: Batch, values: jax.Array, rewards: jax.Array) -> jax.Array:
  """Advantages "B T" by ``config.advantage.name``, 0 off actions: the one match over them."""
  advantage = config.advantage
  match advantage.name:
    case "gae":
      result = gae(advantage, batch, values, rewards)
    case "group":
      means, group, _ = episode_means(batch)
      own = group_relative(means, group, len(means), scale=advantage.group_scale)
      result = per_token(own[jnp.maximum(batch.episode, 0)], batch.segment_ids)
    case "running_mean":
      result = per_token(batch.returns - batch.baseline, batch.segment_ids)
    case "batch_mean":
      # Over episodes: each counts once, by the mean of its trajectories' returns.
      means, _, present = episode_means(batch)
      mean = jnp.where(present, means, 0.0).sum() / jnp.maximum(present.sum(), 1)
      result = per_token(batch.returns - mean, batch.segment_ids)
    case other:
      raise ValueError(
        f"advantage.name = {other!r}: choose one of gae, group, running_mean, batch_mean"
      )
  return normalized(jnp.where(batch.action_mask, result, 0.0), batch, advantage)


def critic_targets(
  config: Config, batch: Batch, values: jax.Array, rewards: jax.Array
) -> jax.Array:
  """λ-returns of the critic's own λ (1 by default: the Monte-Carlo return), 0 off actions."""
  mask = advantage_mask(batch, config.advantage.skip_observations)
  discounts = advantage_discounts(batch, mask, config.advantage.gamma)
  lambda_ = jnp.full(batch.tokens.shape, config.critic.lambda_, jnp.float32)
  advantages = batched_skip_observation_gae(rewards, values, discounts, mask, lambda_)
  return jnp.where(batch.action_mask, advantages + values, 0.0)


def make_estimate(config: Config, critic_def: nnx.GraphDef | None) -> Callable:
  """estimate(critic params or None, batch) → (Estimates, metrics): one critic forward."""

  @jax.jit
  def estimate(critic: Any, batch: Batch) -> tuple[Estimates, Metrics]:
    if critic_def is None:
      values = next_values = jnp.zeros(batch.tokens.shape, jnp.float32)
    else:
      model = nnx.merge(critic_def, critic)
      values, next_values = token_values(model, batch.tokens, batch.positions, batch.segment_ids)
    rewards = bootstrapped_rewards(batch, next_values, config.advantage.gamma)
    advantages = advantages_of(config, batch, values, rewards)
    targets = critic_targets(config, batch, values, rewards)
    metrics = {
      "critic/explained_variance": explained_variance(values, targets, batch.value_mask),
      "critic/value_mean": masked_mean(values, batch.action_mask),
      "advantage/mean": masked_mean(advantages, batch.action_mask),
      "advantage/abs": masked_mean(jnp.abs(advantages), batch.action_mask),
    }
    return Estimates(values, advantages, targets, batch.rollout_logprobs), metrics

  return estimate
