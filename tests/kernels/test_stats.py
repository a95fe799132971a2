"""Masked statistics against numpy on the masked-in entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.kernels import stats


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.1, 0.5, 1.0]), q=st.floats(0, 1))
def test_equals_numpy_on_the_entries_under_the_mask(seed, share, q):
  rng = np.random.default_rng(seed)
  x = (3 + rng.standard_normal((6, 8))).astype(np.float32)
  mask = rng.random((6, 8)) < share
  mask[0, 0] = True
  dirty = jnp.asarray(np.where(mask, x, np.nan))
  chosen, m = x[mask].astype(np.float64), jnp.asarray(mask)
  np.testing.assert_allclose(stats.masked_mean(dirty, m), chosen.mean(), rtol=1e-5)
  white = np.where(mask, (x - chosen.mean()) / (chosen.std() + 1e-6), 0.0)
  np.testing.assert_allclose(stats.whitened(dirty, m), white, rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(stats.masked_std(dirty, m), chosen.std(), rtol=1e-4, atol=1e-6)
  quantile = stats.masked_quantile(dirty, m, q)
  np.testing.assert_allclose(quantile, np.quantile(chosen, q), rtol=1e-4)
  weights = np.exp(chosen)
  expected = weights.sum() ** 2 / np.square(weights).sum()
  np.testing.assert_allclose(stats.effective_sample_size(dirty, m), expected, rtol=1e-4)


def test_empty_masks_give_zero_and_no_nan_gradient():
  x, none = jnp.full(4, jnp.nan), jnp.zeros(4, bool)
  for value in (
    stats.masked_mean(x, none),
    stats.whitened(x, none).any(),
    stats.masked_std(x, none),
    stats.masked_quantile(x, none, 0.5),
    stats.explained_variance(x, x, none),
    stats.effective_sample_size(x, none),
  ):
    assert float(value) == 0.0
  assert not np.asarray(jax.grad(stats.masked_mean)(x, none)).any()


def test_explained_variance():
  returns = jnp.array([1.0, 2.0, 3.0, jnp.nan])
  mask = jnp.array([True, True, True, False])
  assert float(stats.explained_variance(returns, returns, mask)) == 1.0
  constant = jnp.full(4, 7.0)
  np.testing.assert_allclose(stats.explained_variance(constant, returns, mask), 0.0, atol=1e-6)
  np.testing.assert_allclose(stats.explained_variance(-returns, returns, mask), -3.0, rtol=1e-5)
  assert float(stats.explained_variance(returns, constant, mask)) == 0.0
  rounded = jnp.array([0.9, 0.9, 0.9 + 6e-8, jnp.nan])  # a recurrence's, all rewards being equal
  assert float(stats.explained_variance(returns, rounded, mask)) == 0.0
  cancelled = jnp.array([1e-8, -2e-8, 0.0, jnp.nan])  # advantages + values, all rewards being 0
  assert float(stats.explained_variance(constant, cancelled, mask)) == 0.0
  for scale in (1e-9, 1e9):  # of the rewards
    scaled = stats.explained_variance(-scale * returns, scale * returns, mask)
    np.testing.assert_allclose(scaled, -3.0, rtol=1e-5)


def test_effective_sample_size_of_equal_and_of_one_weight():
  mask = jnp.ones(5, bool)
  np.testing.assert_allclose(stats.effective_sample_size(jnp.full(5, 90.0), mask), 5.0, rtol=1e-6)
  one = jnp.array([0.0, -jnp.inf, -jnp.inf, -jnp.inf, -jnp.inf])
  np.testing.assert_allclose(stats.effective_sample_size(one, mask), 1.0)
  assert float(stats.effective_sample_size(jnp.full(5, -jnp.inf), mask)) == 0.0


def test_kl_estimators_average_to_the_kl():
  """p = (.5, .3, .2), q = (.2, .3, .5): E_p[k1] = E_p[k3] = KL(p ‖ q); k2 by hand."""
  p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
  args = jnp.asarray(np.log(p), jnp.float32), jnp.asarray(np.log(q), jnp.float32)
  kl = (p * np.log(p / q)).sum()
  np.testing.assert_allclose((p * stats.kl_k1(*args)).sum(), kl, rtol=1e-5)
  np.testing.assert_allclose((p * stats.kl_k3(*args)).sum(), kl, rtol=1e-5)
  np.testing.assert_allclose(stats.kl_k2(*args)[0], 0.5 * np.log(2.5) ** 2, rtol=1e-5)
  assert (np.asarray(stats.kl_k3(*args)) >= 0).all()


@pytest.mark.parametrize("name", ["masked_mean", "masked_std", "whitened"])
def test_vmap_and_jit_equal_the_loop(name):
  function = getattr(stats, name)
  x = jax.random.normal(jax.random.key(0), (3, 7))
  vmapped = jax.jit(jax.vmap(function))(x, x > -0.5)
  loop = [function(row, row > -0.5) for row in x]
  np.testing.assert_allclose(vmapped, loop, rtol=1e-5)
