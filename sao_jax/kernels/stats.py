"""Statistics over masked arrays: finite on an empty mask, whatever is off the mask stays out.

KL estimators are per token, for tokens sampled from the first policy
(http://joschu.net/blog/kl-approx.html).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def masked_mean(x: Float[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, ""]:
  """Mean of x over the mask; 0 if the mask is empty."""
  return jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def masked_std(x: Float[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, ""]:
  """Population standard deviation of x over the mask; 0 if fewer than two entries are in it."""
  centred = jnp.where(mask, x, 0.0) - masked_mean(x, mask)
  return jnp.sqrt(masked_mean(jnp.square(centred), mask))


def whitened(
  x: Float[Array, "*n"], mask: Bool[Array, "*n"], eps: float = 1e-6
) -> Float[Array, "*n"]:
  """(x - mean) / (std + eps) over the mask, population std; 0 off the mask."""
  # Columns are counted in the narrowest integers that hold the count: on CPU most cost is widening.
  columns = mask.sum(0, dtype=np.min_scalar_type(mask.shape[0]))
  count = jnp.maximum(columns.astype(jnp.float32).sum(), 1.0)
  mean = jnp.where(mask, x, 0.0).sum() / count
  centred = jnp.where(mask, x - mean, 0.0)
  std = jnp.sqrt(jnp.square(centred).sum() / count)
  return centred * (1.0 / (std + eps))


def masked_quantile(
  x: Float[Array, "*n"], mask: Bool[Array, "*n"], q: float | Float[Array, ""]
) -> Float[Array, ""]:
  """Quantile q in [0, 1] of x over the mask, linear between order statistics; 0 if it is empty."""
  count = mask.sum()
  ordered = jnp.sort(jnp.where(mask, x, jnp.inf).ravel())
  last = jnp.maximum(count - 1, 0)
  position = q * last.astype(jnp.float32)
  low = jnp.clip(jnp.floor(position).astype(jnp.int32), 0, last)
  high = jnp.minimum(low + 1, last)
  share = position - low.astype(jnp.float32)
  below, above = ordered[low], ordered[high]
  return jnp.where(count > 0, below + share * jnp.where(high > low, above - below, 0.0), 0.0)


def explained_variance(
  values: Float[Array, "*n"], returns: Float[Array, "*n"], mask: Bool[Array, "*n"]
) -> Float[Array, ""]:
  """1 - Var(returns - values) / Var(returns) over the mask.

  1 is a perfect critic, 0 one no better than a constant, negative worse.  0 when the returns do not
  vary by more than the rounding of advantages + values: there is nothing to explain.
  """
  error = jnp.where(mask, returns, 0.0) - jnp.where(mask, values, 0.0)
  sizes = jnp.maximum(jnp.abs(returns), jnp.abs(values))
  largest = jnp.where(mask, sizes, 0.0).max(initial=0.0)
  deviation = masked_std(returns, mask)
  varies = deviation > 1e-6 * largest
  unexplained = jnp.square(masked_std(error, mask) / jnp.where(varies, deviation, 1.0))
  return jnp.where(varies, 1.0 - unexplained, 0.0)


def kl_k1(logprobs: Float[Array, "*n"], other: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """log π - log π_other: unbiased for KL(π ‖ π_other), high variance, can be negative."""
  return logprobs - other


def kl_k2(logprobs: Float[Array, "*n"], other: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """(log π - log π_other)² / 2: biased, low variance, its gradient is that of the KL."""
  return 0.5 * jnp.square(logprobs - other)


def kl_k3(logprobs: Float[Array, "*n"], other: Float[Array, "*n"]) -> Float[Array, "*n"]:
  """π_other / π - 1 - log(π_other / π): unbiased for KL(π ‖ π_other), never negative."""
  log_ratio = other - logprobs
  return jnp.expm1(log_ratio) - log_ratio


def effective_sample_size(
  log_weights: Float[Array, "*n"], mask: Bool[Array, "*n"]
) -> Float[Array, ""]:
  """Kish's (Σ w)² / Σ w² of the importance weights exp(log_weights) over the mask.

  Between 1 and the number of entries; 0 if the mask is empty or every weight in it is 0.
  """
  top = jnp.max(jnp.where(mask, log_weights, -jnp.inf), initial=-jnp.inf)
  top = jnp.where(jnp.isfinite(top), top, 0.0)
  weights = jnp.exp(jnp.where(mask, log_weights - top, -jnp.inf))
  squares = jnp.square(weights).sum()
  return jnp.where(squares > 0, jnp.square(weights.sum()) / jnp.where(squares > 0, squares, 1.0), 0)
