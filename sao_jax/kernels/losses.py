"""Token losses: DIS, PPO, decoupled PPO, A-3PO's proximal policy, CISPO, IcePop, the value loss.

All are elementwise and return the loss of each token; the caller takes the average, over a
denominator in which tokens that a loss zeroes stay.

A probability of zero on either side (an infinite log-ratio), or a log-ratio whose exponential
overflows, gives exactly zero loss and zero gradient.  NaN log-probs are a defect of the model and
do come through, so that the caller's finite check sees them.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Int, Int8

MAX_LOG_RATIO = math.log(float(np.finfo(np.float32).max))  # 88.7: above it exp overflows


def _ratio(
  logprobs: Float[Array, "*n"], reference: Float[Array, "*n"]
) -> tuple[Float[Array, "*n"], Bool[Array, "*n"], Bool[Array, "*n"]]:
  """exp(logprobs - reference), and where it is no finite positive number: (ratio, zero, infinite).

  The ratio is 1 there, and the log-ratio is replaced before the exponential: 0 * inf in a backward
  pass would be NaN.
  """
  log_ratio = logprobs - reference
  zero = logprobs == -jnp.inf
  infinite = (log_ratio > MAX_LOG_RATIO) & ~zero
  ratio = jnp.exp(jnp.where(zero | infinite, 0.0, log_ratio))
  return ratio, zero, infinite


def _sides(below: Bool[Array, "*n"], above: Bool[Array, "*n"]) -> Int8[Array, "*n"]:
  return above.astype(jnp.int8) - below.astype(jnp.int8)


def dis_loss(
  logprobs: Float[Array, "*n"],
  rollout_logprobs: Float[Array, "*n"],
  advantages: Float[Array, "*n"],
  *,
  eps_low: float,
  eps_high: float,
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
  """Two-sided token masking against the rollout policy (DIS of SAO, arXiv 2607.07508).

  With r = exp(logprobs - rollout_logprobs), f = r where 1 - eps_low < r < 1 + eps_high, else 0::

      loss = -stop_gradient(f) * advantage * logprob         d loss / d logprob = -f * advantage

  whatever the sign of the advantage.  The paper's bands (1 - eps_low, 1 + eps_high) are (0.7, 6.0)
  for mathematics and (0.2, 4.0) for coding.

  Args:
    logprobs: log π of the sampled tokens under the policy being trained, at their temperature.
    rollout_logprobs: the same recorded when the token was sampled.
    advantages: taken as constants.
    eps_low: width of the band below 1; 1 or more leaves only the upper edge.
    eps_high: width of the band above 1.

  Returns:
    The loss of each token, and where it was masked: -1 below the band, 0 kept, +1 above it.
  """
  constant = stop_gradient(logprobs)
  impossible = constant == -jnp.inf  # also where the rollout has -inf: their difference is NaN
  log_ratio = jnp.where(impossible, -jnp.inf, constant - stop_gradient(rollout_logprobs))
  ratio = jnp.exp(log_ratio)
  below = ratio <= max(1.0 - eps_low, 0.0)
  above = ratio >= 1.0 + eps_high
  factor = jnp.where(below | above, 0.0, ratio)
  loss = -factor * stop_gradient(advantages) * jnp.where(impossible, 0.0, logprobs)
  return loss, _sides(below, above)


def _clipped_surrogate(
  ratio: Float[Array, "*n"], advantages: Float[Array, "*n"], eps_low: float, eps_high: float
) -> tuple[Float[Array, "*n"], Bool[Array, "*n"], Bool[Array, "*n"]]:
  """max(-r * A, -clip(r) * A), and where the clip took the gradient away: (loss, below, above)."""
  below = (ratio < 1.0 - eps_low) & (advantages < 0)
  above = (ratio > 1.0 + eps_high) & (advantages > 0)
  clipped = jnp.where(below, 1.0 - eps_low, jnp.where(above, 1.0 + eps_high, ratio))
  return -clipped * advantages, below, above


def ppo_loss(
  logprobs: Float[Array, "*n"],
  old_logprobs: Float[Array, "*n"],
  advantages: Float[Array, "*n"],
  *,
  eps_low: float,
  eps_high: float,
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
  """The clipped surrogate of PPO (arXiv 1707.06347), with separate widths (DAPO, arXiv 2503.14476).

  With r = exp(logprobs - old_logprobs)::

      loss = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)

  Args:
    logprobs: log π of the sampled tokens under the policy being trained.
    old_logprobs: the same under the policy the ratio is taken against; a constant.
    advantages: taken as constants.
    eps_low: clip width below 1.
    eps_high: clip width above 1.

  Returns:
    The loss of each token, and where its gradient was clipped away: -1 below the band (advantage
    negative), 0 kept, +1 above it (advantage positive).  A ratio of 0 or infinity counts as below
    or above whatever the sign, and its loss is 0.
  """
  ratio, zero, infinite = _ratio(logprobs, stop_gradient(old_logprobs))
  loss, below, above = _clipped_surrogate(ratio, stop_gradient(advantages), eps_low, eps_high)
  unusable = zero | infinite
  return jnp.where(unusable, 0.0, loss), _sides(below | zero, above | infinite)


def proximal_logprobs(
  logprobs: Float[Array, "*n"],
  rollout_logprobs: Float[Array, "*n"],
  staleness: Int[Array, "*n"],
  *,
  alpha_at_zero: float = 0.0,
) -> Float[Array, "*n"]:
  """A-3PO's proximal policy, interpolated instead of recomputed (arXiv 2512.06547).

      log π_prox = α log π_rollout + (1 - α) log π        α = 1 / d for d >= 1

  with d the staleness of that token: the fresher the token, the nearer to the policy that sampled
  it.  The result is a constant (no gradient).

  Args:
    logprobs: log π of the sampled tokens under the policy being trained.
    rollout_logprobs: the same recorded when the token was sampled.
    staleness: versions between sampling and training, >= 0.
    alpha_at_zero: α at d = 0.  The article has 0 (the proximal policy is then the current one, so
      a fresh token has no trust region); AReaL's code behaves as 1.

  Returns:
    log π_prox of each token.
  """
  age = jnp.maximum(staleness, 1).astype(jnp.float32)
  alpha = jnp.where(staleness >= 1, 1.0 / age, alpha_at_zero)
  logprobs = stop_gradient(logprobs)
  rollout_logprobs = stop_gradient(rollout_logprobs)
  mixed = logprobs + alpha * (rollout_logprobs - logprobs)
  # Exact ends: 0 * inf must not turn a log-prob of -inf into NaN, nor rounding move a ratio of 1.
  return jnp.where(alpha == 1.0, rollout_logprobs, jnp.where(alpha == 0.0, logprobs, mixed))


def decoupled_ppo_loss(
  logprobs: Float[Array, "*n"],
  prox_logprobs: Float[Array, "*n"],
  rollout_logprobs: Float[Array, "*n"],
  advantages: Float[Array, "*n"],
  *,
  eps_low: float,
  eps_high: float,
  max_behavior_weight: float | int | None = None,
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
  """PPO clipped around a proximal policy, weighted back to the rollout policy (arXiv 2110.00641).

  With w = π_prox / π_rollout (a constant) and r = π / π_prox::

      loss = -w * min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)

  With A-3PO's ``proximal_logprobs`` and d >= 1 this equals importance-weighted policy gradient with
  a mask, by the sign of the advantage, on π / π_rollout at [(1 - eps_low)^d, (1 + eps_high)^d].

  Args:
    logprobs: log π of the sampled tokens under the policy being trained.
    prox_logprobs: the same under the proximal policy, interpolated or recomputed; a constant.
    rollout_logprobs: the same recorded when the token was sampled.
    advantages: taken as constants.
    eps_low: clip width below 1.
    eps_high: clip width above 1.
    max_behavior_weight: a token whose w exceeds this is masked (loss 0, +1); None: no bound.

  Returns:
    The loss of each token, and where its gradient was taken away: -1, 0 or +1 as in ``ppo_loss``.
  """
  prox_logprobs = stop_gradient(prox_logprobs)
  weight, weight_zero, weight_infinite = _ratio(prox_logprobs, stop_gradient(rollout_logprobs))
  ratio, ratio_zero, ratio_infinite = _ratio(logprobs, prox_logprobs)
  loss, below, above = _clipped_surrogate(ratio, stop_gradient(advantages), eps_low, eps_high)
  never_sampled = (rollout_logprobs == -jnp.inf) & (logprobs != -jnp.inf)
  zero = (ratio_zero | weight_zero) & ~never_sampled
  infinite = (ratio_infinite | weight_infinite | never_sampled) & ~zero
  if max_behavior_weight is not None:
    infinite = infinite | (~zero & (weight > max_behavior_weight))
  outside = zero | infinite
  below, above = (below | zero) & ~infinite, (above | infinite) & ~zero
  return jnp.where(outside, 0.0, weight * loss), _sides(below, above)


def icepop_loss(
  logprobs: Float[Array, "*n"],
  prox_logprobs: Float[Array, "*n"],
  rollout_logprobs: Float[Array, "*n"],
  advantages: Float[Array, "*n"],
  *,
  eps_low: float,
  eps_high: float,
  min_behavior_weight: float,
  max_behavior_weight: float,
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
  """Decoupled PPO with the behaviour weight masked on both sides (IcePop, of arXiv 2510.18855).

  With w = π_prox / π_rollout, where π_prox is the trainer's own log-probs of the sampled tokens::

      loss = -M(w) * min(r * A, clip(r) * A)        M(w) = w if min <= w <= max, else 0

  Args:
    logprobs, prox_logprobs, rollout_logprobs, advantages, eps_low, eps_high: as in
      ``decoupled_ppo_loss``.
    min_behavior_weight: lower end of the band on w; the article has 0.5.
    max_behavior_weight: upper end; the article has 5.

  Returns:
    The loss of each token, and where its gradient was taken away: -1, 0 or +1.
  """
  loss, sides = decoupled_ppo_loss(
    logprobs,
    prox_logprobs,
    rollout_logprobs,
    advantages,
    eps_low=eps_low,
    eps_high=eps_high,
    max_behavior_weight=max_behavior_weight,
  )
  log_weight = stop_gradient(prox_logprobs) - stop_gradient(rollout_logprobs)
  below = jnp.exp(log_weight) < min_behavior_weight
  return jnp.where(below, 0.0, loss), jnp.where(below, jnp.int8(-1), sides)


def cispo_loss(
  logprobs: Float[Array, "*n"],
  old_logprobs: Float[Array, "*n"],
  advantages: Float[Array, "*n"],
  *,
  eps_low: float,
  eps_high: float,
) -> tuple[Float[Array, "*n"], Int8[Array, "*n"]]:
  """Policy gradient with a clipped importance weight, no token without gradient (arXiv 2506.13585).

  With r = exp(logprobs - old_logprobs)::

      loss = -stop_gradient(clip(r, 1 - eps_low, 1 + eps_high)) * A * logprob

  ``eps_low = 1`` and ``eps_high = C - 1`` are truncated importance sampling, min(r, C).

  Args:
    logprobs, old_logprobs, advantages: as in ``ppo_loss``.
    eps_low: clip width below 1; 1 leaves only the upper edge.
    eps_high: clip width above 1.

  Returns:
    The loss of each token, and where its weight was clipped: -1 below, 0 not, +1 above.
  """
  ratio, zero, infinite = _ratio(stop_gradient(logprobs), stop_gradient(old_logprobs))
  low, high = max(1.0 - eps_low, 0.0), 1.0 + eps_high
  unusable = zero | infinite
  loss = -jnp.clip(ratio, low, high) * stop_gradient(advantages) * jnp.where(unusable, 0, logprobs)
  return loss, _sides((ratio < low) | zero, (ratio > high) | infinite)


def value_loss(values: Float[Array, "*n"], returns: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """(V - R)^2 of each token: no half, no clip.  ``returns`` are constants."""
  return jnp.square(values - stop_gradient(returns))
