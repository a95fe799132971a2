"""Losses against hand-worked numbers, closed-form gradients and their identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.kernels.losses import (
  cispo_loss,
  decoupled_ppo_loss,
  dis_loss,
  icepop_loss,
  ppo_loss,
  proximal_logprobs,
  value_loss,
)

BAND = {"eps_low": 0.3, "eps_high": 5.0}
CLIP = {"eps_low": 0.2, "eps_high": 0.3}
N = 64


def case(seed, spread=0.6):
  rng = np.random.default_rng(seed)
  rollout = -np.abs(rng.standard_normal(N)) - 0.1
  logprobs = np.minimum(rollout + spread * rng.standard_normal(N), -1e-3)
  arrays = logprobs, rollout, rng.standard_normal(N)
  return (*(jnp.asarray(x, jnp.float32) for x in arrays), rng.integers(0, 5, N).astype(np.int32))


def away(ratio, *edges):
  """Tokens whose ratio is not within 1e-3 of an edge, where rounding decides."""
  return np.all([np.abs(np.asarray(ratio) - e) > 1e-3 * max(e, 1) for e in edges], axis=0)


def grads(loss, logprobs, *rest, **kwargs):
  """Gradient of each token's loss by its own log-prob."""
  return np.asarray(jax.grad(lambda x: loss(x, *rest, **kwargs)[0].sum())(logprobs))


# --- DIS ---


def test_dis_worked_number():
  """r = 2 kept: loss -2 · 3 · log ½; r = .5 below, r = 8 above: 0."""
  rollout = jnp.log(jnp.array([0.25, 0.5, 0.1]))
  logprobs = jnp.log(jnp.array([0.5, 0.25, 0.8]))
  advantages = jnp.array([3.0, -1.0, 1.0])
  loss, masked = dis_loss(logprobs, rollout, advantages, **BAND)
  np.testing.assert_allclose(loss, [6 * np.log(2), 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(masked, [0, -1, 1])
  assert masked.dtype == jnp.int8
  np.testing.assert_allclose(grads(dis_loss, logprobs, rollout, advantages, **BAND), [-6, 0, 0])


def test_dis_without_a_gap_is_plain_policy_gradient():
  logprobs, _, advantages, _ = case(0)
  loss, masked = dis_loss(logprobs, logprobs, advantages, **BAND)
  np.testing.assert_allclose(loss, -advantages * logprobs, rtol=1e-6)
  np.testing.assert_allclose(grads(dis_loss, logprobs, logprobs, advantages, **BAND), -advantages)
  assert not np.asarray(masked).any()


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**31),
  spread=st.sampled_from([0.05, 0.6, 3.0]),
  band=st.sampled_from([(0.3, 5.0), (0.8, 3.0)]),
)
def test_dis_equals_its_closed_form(seed, spread, band):
  logprobs, rollout, advantages, _ = case(seed, spread)
  eps = {"eps_low": band[0], "eps_high": band[1]}
  ratio = np.exp(np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64))
  inside = (ratio > 1 - band[0]) & (ratio < 1 + band[1])
  expected = np.where(inside, -ratio * advantages, 0)
  safe = away(ratio, 1 - band[0], 1 + band[1])
  loss, masked = dis_loss(logprobs, rollout, advantages, **eps)
  np.testing.assert_allclose(np.asarray(loss)[safe], (expected * logprobs)[safe], rtol=1e-4)
  np.testing.assert_allclose(
    grads(dis_loss, logprobs, rollout, advantages, **eps)[safe], expected[safe], rtol=1e-4
  )
  sides = np.where(ratio >= 1 + band[1], 1, np.where(ratio <= 1 - band[0], -1, 0))
  np.testing.assert_array_equal(np.asarray(masked)[safe], sides[safe])


def test_dis_band_is_open():
  logprobs = jnp.zeros(2)
  rollout = -jnp.log(jnp.array([0.5, 2.0]))
  loss, masked = dis_loss(logprobs, rollout, jnp.ones(2), eps_low=0.5, eps_high=1.0)
  np.testing.assert_array_equal(masked, [-1, 1])
  np.testing.assert_array_equal(loss, [0, 0])


# --- Extreme log-ratios, for every loss ---

LOSSES = {
  "dis": lambda lp, old, a: dis_loss(lp, old, a, **BAND),
  "dis, no lower edge": lambda lp, old, a: dis_loss(lp, old, a, eps_low=1.5, eps_high=jnp.inf),
  "ppo": lambda lp, old, a: ppo_loss(lp, old, a, **CLIP),
  "decoupled": lambda lp, old, a: decoupled_ppo_loss(lp, old, old, a, **CLIP),
  "icepop": lambda lp, old, a: icepop_loss(
    lp, old, old, a, min_behavior_weight=0.5, max_behavior_weight=5.0, **CLIP
  ),
  "cispo": lambda lp, old, a: cispo_loss(lp, old, a, **CLIP),
  **{
    f"a3po d = {d}, α(0) = {at_zero}": lambda lp, old, a, d=d, at_zero=at_zero: decoupled_ppo_loss(
      lp,
      proximal_logprobs(lp, old, jnp.full(lp.shape, d), alpha_at_zero=at_zero),
      old,
      a,
      **CLIP,
    )
    for d, at_zero in ((0, 0.0), (0, 1.0), (1, 0.0), (3, 0.0))
  },
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_infinite_log_ratios_give_exactly_zero(name, sign):
  logprobs = jnp.array([-jnp.inf, -1.0, -jnp.inf, -1.0])
  rollout = jnp.array([-1.0, -jnp.inf, -jnp.inf, -2e38])
  for wrap in (jax.jit, lambda f: f):
    loss, flags = wrap(LOSSES[name])(logprobs, rollout, jnp.full(4, sign))
    np.testing.assert_array_equal(loss, np.zeros(4))
    np.testing.assert_array_equal(flags, [-1, 1, -1, 1])
    gradient = wrap(jax.grad(lambda x: LOSSES[name](x, rollout, jnp.full(4, sign))[0].sum()))
    np.testing.assert_array_equal(gradient(logprobs), np.zeros(4))


@pytest.mark.parametrize("name", LOSSES)
def test_nan_logprobs_come_through(name):
  loss, _ = LOSSES[name](jnp.array([jnp.nan]), jnp.array([-1.0]), jnp.ones(1))
  assert np.isnan(loss).all()


@pytest.mark.parametrize("name", LOSSES)
def test_jit_and_vmap_equal_the_loop(name):
  logprobs, rollout, advantages, _ = case(3)
  direct = LOSSES[name](logprobs, rollout, advantages)
  rows = [x.reshape(4, 16) for x in (logprobs, rollout, advantages)]
  vmapped = jax.jit(jax.vmap(LOSSES[name]))(*rows)
  for a, b in zip(direct, vmapped, strict=True):
    np.testing.assert_allclose(a, b.ravel(), rtol=1e-6, atol=1e-7)
  each = [LOSSES[name](*(x[i : i + 1] for x in (logprobs, rollout, advantages))) for i in range(8)]
  np.testing.assert_allclose(direct[0][:8], np.concatenate([e[0] for e in each]), rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_no_gradient_into_what_is_constant(name):
  logprobs, rollout, advantages, _ = case(4)
  into = jax.grad(lambda *args: LOSSES[name](*args)[0].sum(), (1, 2))
  for gradient in into(logprobs, rollout, advantages):
    assert not np.asarray(gradient).any()


# --- PPO ---


def test_ppo_worked_number():
  """r = 2, A = 1: clipped to 1.3; r = .5, A = -1: clipped to .8; r = 2, A = -1: kept."""
  logprobs = jnp.log(jnp.array([0.5, 0.25, 0.5]))
  old = jnp.log(jnp.array([0.25, 0.5, 0.25]))
  advantages = jnp.array([1.0, -1.0, -1.0])
  loss, clipped = ppo_loss(logprobs, old, advantages, **CLIP)
  np.testing.assert_allclose(loss, [-1.3, 0.8, 2.0], rtol=1e-6)
  np.testing.assert_array_equal(clipped, [1, -1, 0])
  np.testing.assert_allclose(grads(ppo_loss, logprobs, old, advantages, **CLIP), [0, 0, 2], 1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.6, 3.0]))
def test_ppo_equals_its_closed_form(seed, spread):
  logprobs, old, advantages, _ = case(seed, spread)
  ratio = np.exp(np.asarray(logprobs, np.float64) - np.asarray(old, np.float64))
  a = np.asarray(advantages, np.float64)
  loss, clipped = ppo_loss(logprobs, old, advantages, **CLIP)
  np.testing.assert_allclose(loss, -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.3) * a), rtol=1e-4)
  kept = np.where(a > 0, ratio < 1.3, ratio > 0.8)
  safe = away(ratio, 0.8, 1.3)
  got = grads(ppo_loss, logprobs, old, advantages, **CLIP)
  np.testing.assert_allclose(got[safe], np.where(kept, -ratio * a, 0)[safe], rtol=1e-4)
  np.testing.assert_array_equal((np.asarray(clipped) == 0)[safe], kept[safe])


# --- A-3PO and decoupled PPO ---


def test_proximal_logprobs_worked_numbers():
  """log π = -1, log π_rollout = -3: α = 1, ½, ¼ at d = 1, 2, 4; the named choice at d = 0."""
  logprobs, rollout = jnp.full(4, -1.0), jnp.full(4, -3.0)
  staleness = jnp.array([0, 1, 2, 4])
  got = proximal_logprobs(logprobs, rollout, staleness)
  np.testing.assert_allclose(got, [-1.0, -3.0, -2.0, -1.5])
  got = proximal_logprobs(logprobs, rollout, staleness, alpha_at_zero=1.0)
  np.testing.assert_allclose(got, [-3.0, -3.0, -2.0, -1.5])
  got = proximal_logprobs(logprobs, rollout, staleness, alpha_at_zero=0.25)
  np.testing.assert_allclose(got[0], -1.5)
  gradient = jax.grad(lambda x: proximal_logprobs(x, rollout, staleness).sum())(logprobs)
  np.testing.assert_array_equal(gradient, np.zeros(4))


def a3po(logprobs, rollout, advantages, staleness, at_zero=0.0):
  prox = proximal_logprobs(logprobs, rollout, staleness, alpha_at_zero=at_zero)
  return decoupled_ppo_loss(logprobs, prox, rollout, advantages, eps_low=0.2, eps_high=0.2)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.6, 1.5]))
def test_a3po_is_a_mask_on_the_behaviour_ratio(seed, spread):
  """d >= 1: importance-weighted policy gradient inside [(1 - ε)^d, (1 + ε)^d], by the sign of A."""
  logprobs, rollout, advantages, staleness = case(seed, spread)
  staleness = np.maximum(staleness, 1)
  ratio = np.exp(np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64))
  a = np.asarray(advantages, np.float64)
  low, high = 0.8**staleness, 1.2**staleness
  kept = np.where(a > 0, ratio < high, ratio > low)
  safe = (np.abs(ratio / low - 1) > 1e-3) & (np.abs(ratio / high - 1) > 1e-3)
  expected = np.where(kept, -ratio * a, 0)
  got = grads(a3po, logprobs, rollout, advantages, jnp.asarray(staleness))
  np.testing.assert_allclose(got[safe], expected[safe], rtol=1e-4, atol=1e-7)
  _, clipped = a3po(logprobs, rollout, advantages, jnp.asarray(staleness))
  np.testing.assert_array_equal((np.asarray(clipped) == 0)[safe], kept[safe])


def test_a3po_at_zero_staleness_both_ways():
  """α = 0: no trust region, the plain importance-weighted gradient.  α = 1: PPO on the rollout."""
  logprobs, rollout, advantages, _ = case(5)
  fresh = jnp.zeros(N, jnp.int32)
  ratio = np.exp(logprobs - rollout)
  got = grads(a3po, logprobs, rollout, advantages, fresh)
  np.testing.assert_allclose(got, -ratio * advantages, rtol=1e-4)
  got = grads(a3po, logprobs, rollout, advantages, fresh, at_zero=1.0)
  expected = grads(ppo_loss, logprobs, rollout, advantages, eps_low=0.2, eps_high=0.2)
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_decoupled_with_the_rollout_as_anchor_is_ppo():
  logprobs, rollout, advantages, _ = case(6)
  loss, clipped = decoupled_ppo_loss(logprobs, rollout, rollout, advantages, **CLIP)
  expected, expected_clipped = ppo_loss(logprobs, rollout, advantages, **CLIP)
  np.testing.assert_array_equal(loss, expected)
  np.testing.assert_array_equal(clipped, expected_clipped)


def test_decoupled_worked_number_and_weight_bound():
  """w = 2, r = 1.5, A = 1: -2 · 1.3; r = 1.1: -2.2 and gradient -2.2; w = 2 > 1.9 is masked."""
  rollout = jnp.log(jnp.array([0.1, 0.1]))
  prox = jnp.log(jnp.array([0.2, 0.2]))
  logprobs = jnp.log(jnp.array([0.3, 0.22]))
  args = logprobs, prox, rollout, jnp.ones(2)
  loss, clipped = decoupled_ppo_loss(*args, **CLIP, max_behavior_weight=2.1)
  np.testing.assert_allclose(loss, [-2.6, -2.2], rtol=1e-6)
  np.testing.assert_array_equal(clipped, [1, 0])
  np.testing.assert_allclose(grads(decoupled_ppo_loss, *args, **CLIP), [0, -2.2], rtol=1e-5)
  loss, clipped = decoupled_ppo_loss(*args, **CLIP, max_behavior_weight=1.9)
  np.testing.assert_array_equal(loss, [0, 0])
  np.testing.assert_array_equal(clipped, [1, 1])
  bounded = grads(decoupled_ppo_loss, *args, **CLIP, max_behavior_weight=1.9)
  np.testing.assert_array_equal(bounded, [0, 0])


# --- IcePop, CISPO ---

ICEPOP = {**CLIP, "min_behavior_weight": 0.5, "max_behavior_weight": 5.0}


def test_icepop_worked_number():
  """w = 2 kept: 2 · -min(1.5 · 3, 1.3 · 3); w = .25 below, w = 8 above: 0 whatever the ratio."""
  rollout = jnp.log(jnp.array([0.2, 0.4, 0.1]))
  prox = jnp.log(jnp.array([0.4, 0.1, 0.8]))
  logprobs = jnp.log(jnp.array([0.6, 0.1, 0.8]))
  loss, masked = icepop_loss(logprobs, prox, rollout, jnp.array([3.0, 1.0, 1.0]), **ICEPOP)
  np.testing.assert_allclose(loss, [-2 * 1.3 * 3, 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(masked, [1, -1, 1])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.05, 0.6, 3.0]))
def test_icepop_equals_its_closed_form(seed, spread):
  logprobs, rollout, advantages, _ = case(seed, spread)
  prox = jnp.asarray(np.random.default_rng(seed + 1).normal(rollout, spread), jnp.float32)
  weight = np.exp(np.asarray(prox, np.float64) - np.asarray(rollout, np.float64))
  ratio = np.exp(np.asarray(logprobs, np.float64) - np.asarray(prox, np.float64))
  clipped = np.clip(ratio, 0.8, 1.3)
  expected = -weight * np.minimum(ratio * advantages, clipped * advantages)
  expected = np.where((weight < 0.5) | (weight > 5.0), 0.0, expected)
  safe = away(weight, 0.5, 5.0)
  loss, _ = icepop_loss(logprobs, prox, rollout, advantages, **ICEPOP)
  np.testing.assert_allclose(np.asarray(loss)[safe], expected[safe], rtol=2e-4)


def test_cispo_worked_number():
  """r = 2 clipped to 1.3, r = 1 kept, r = .5 clipped to .8: each still has a gradient."""
  rollout = jnp.log(jnp.array([0.25, 0.5, 0.5]))
  logprobs = jnp.log(jnp.array([0.5, 0.5, 0.25]))
  advantages = jnp.array([3.0, -1.0, 1.0])
  loss, masked = cispo_loss(logprobs, rollout, advantages, **CLIP)
  weights = np.array([1.3, 1.0, 0.8])
  np.testing.assert_allclose(loss, -weights * advantages * logprobs, rtol=1e-6)
  np.testing.assert_array_equal(masked, [1, 0, -1])
  slope = grads(cispo_loss, logprobs, rollout, advantages, **CLIP)
  np.testing.assert_allclose(slope, -weights * advantages, rtol=1e-6)


def test_cispo_without_a_lower_edge_is_truncated_importance_sampling():
  logprobs, rollout, advantages, _ = case(3, 1.0)
  slope = grads(cispo_loss, logprobs, rollout, advantages, eps_low=1.0, eps_high=1.0)
  expected = -np.minimum(np.exp(np.asarray(logprobs - rollout, np.float64)), 2.0) * advantages
  np.testing.assert_allclose(slope, expected, rtol=1e-4)


def test_value_loss():
  values, returns = jnp.array([1.0, 0.5]), jnp.array([3.0, 0.5])
  np.testing.assert_allclose(value_loss(values, returns), [4.0, 0.0])
  gradient = jax.grad(lambda v, r: value_loss(v, r).sum(), (0, 1))(values, returns)
  np.testing.assert_allclose(gradient, [[-4.0, 0.0], [0.0, 0.0]])
