"""Advantage kernels against hand-worked numbers, simpler estimators and a float64 loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.kernels import advantages as kernels
from sao_jax.kernels.advantages import (
  batched_skip_observation_gae,
  group_relative,
  length_adaptive_lambda,
  running_mean_baseline,
  skip_observation_gae,
  step_level_gae,
)

gae = jax.jit(skip_observation_gae)
batched = jax.jit(batched_skip_observation_gae)
FORMS = {
  "scan": jax.jit(lambda *args: kernels._scan(*args)[1]),
  "associative": jax.jit(kernels._associative),
}


def oracle(rewards, values, discounts, mask, lambda_):
  """Cuts the observations out and runs textbook GAE in float64."""
  at = np.flatnonzero(mask)
  lambdas = np.broadcast_to(np.asarray(lambda_, np.float64), np.shape(mask))[at]
  r, v, g = (np.asarray(x, np.float64)[at] for x in (rewards, values, discounts))
  out, advantage, next_value = np.zeros(len(at)), 0.0, 0.0
  for t in range(len(at) - 1, -1, -1):
    advantage = r[t] + g[t] * next_value - v[t] + g[t] * lambdas[t] * advantage
    next_value = v[t]
    out[t] = advantage
  full = np.zeros(len(mask))
  full[at] = out
  return full


def case(seed, length, scale=1.0, actions=0.6, splits=0.1):
  """Random arrays as numpy float32: rewards, values, discounts (0 at splits), mask."""
  rng = np.random.default_rng(seed)
  mask = rng.random(length) < actions
  discounts = np.where(rng.random(length) < splits, 0.0, rng.choice([1.0, 0.99, 0.9], length))
  rewards = rng.standard_normal(length)
  values = scale * rng.standard_normal(length)
  return *(x.astype(np.float32) for x in (rewards, values, discounts)), mask


def relative_error(got, reference):
  return np.abs(np.asarray(got) - reference).max() / max(np.abs(reference).max(), 1e-30)


def jnps(*arrays):
  return tuple(map(jnp.asarray, arrays))


# --- Skip-observation GAE ---


def test_worked_number():
  """δ = .2, .4, -.1 with γ = 1, λ = .9: Â = .2 + .9 (.4 - .9 · .1) = .479."""
  delta = jnp.array([0.2, 0.4, -0.1])
  got = skip_observation_gae(delta, jnp.zeros(3), jnp.array([1.0, 1.0, 0.0]), delta < 9, 0.9)
  np.testing.assert_allclose(got, [0.479, 0.31, -0.1], rtol=1e-6)


def test_worked_number_with_values_and_an_observation():
  """V = .5, .7 around an observation of value 9: Â_2 = 1 - .7, Â_0 = (.7 - .5) + .9 · .3."""
  rewards, values = jnp.array([0.0, 0.0, 1.0]), jnp.array([0.5, 9.0, 0.7])
  mask = jnp.array([True, False, True])
  got = skip_observation_gae(rewards, values, jnp.array([1.0, 1.0, 0.0]), mask, 0.9)
  np.testing.assert_allclose(got, [0.47, 0.0, 0.3], rtol=1e-6)


def test_lambda_one_is_return_to_go_minus_value():
  rewards, values, _, mask = case(0, 40)
  to_go = np.cumsum(np.where(mask, rewards, 0)[::-1])[::-1]
  got = gae(*jnps(rewards, values, np.ones(40, np.float32), mask), 1.0)
  np.testing.assert_allclose(got, np.where(mask, to_go - values, 0), atol=1e-5)


def test_lambda_zero_is_the_temporal_difference():
  rewards, values, discounts, _ = case(1, 40)
  got = gae(*jnps(rewards, values, discounts, np.ones(40, bool)), 0.0)
  next_values = np.append(values[1:], 0)
  np.testing.assert_allclose(got, rewards + discounts * next_values - values, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_inserted_observations_change_nothing(form):
  rewards, values, discounts, _ = case(2, 12)
  short = FORMS[form](*jnps(rewards, values, discounts, np.ones(12, bool)), jnp.float32(0.9))
  at = np.array([0, 1, 2, 10, 11, 20, 21, 22, 23, 30, 38, 39])
  stretched = [np.full(40, fill, np.float32) for fill in (7.0, -5.0, 0.3)]
  for array, source in zip(stretched, (rewards, values, discounts), strict=True):
    array[at] = source
  mask = np.isin(np.arange(40), at)
  long = FORMS[form](*jnps(*stretched, mask), jnp.float32(0.9))
  np.testing.assert_allclose(np.asarray(long)[at], short, rtol=1e-6, atol=1e-6)
  assert not np.asarray(long)[~mask].any()


@settings(max_examples=60, deadline=None)
@given(
  seed=st.integers(0, 2**31),
  actions=st.sampled_from([0.0, 0.02, 0.5, 0.95, 1.0]),
  splits=st.sampled_from([0.0, 0.05, 0.5]),
  scale=st.sampled_from([1e-3, 1.0, 10.0]),
  per_token=st.booleans(),
)
def test_equals_the_float64_loop(seed, actions, splits, scale, per_token):
  rewards, values, discounts, mask = case(seed, 48, scale, actions, splits)
  rng = np.random.default_rng(seed)
  lambda_ = rng.random(48).astype(np.float32) if per_token else np.full(48, rng.random(), "f4")
  reference = oracle(rewards, values, discounts, mask, lambda_)
  for form in FORMS.values():
    got = form(*jnps(rewards, values, discounts, mask, lambda_))
    assert relative_error(got, reference) <= 3e-5
    assert not np.asarray(got)[~mask].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lambda_", [1 - 1 / (1.5 * 131072), 0.95, 1.0])
@pytest.mark.parametrize("values", ["noise", "constant"])
def test_precision_over_131072_tokens(form, lambda_, values):
  """A nearly constant critic with λ near 1 is where a single V + λÂ carry stands still."""
  length = 131072
  rewards, noise, _, mask = case(3, length, actions=0.9)
  if values == "constant":
    rewards, noise = np.zeros_like(rewards), np.full_like(noise, 0.99)
    rewards[np.flatnonzero(mask)[-1]] = 1.0
  discounts = np.ones(length, np.float32)
  reference = oracle(rewards, noise, discounts, mask, np.float32(lambda_))
  got = FORMS[form](*jnps(rewards, noise, discounts, mask), jnp.float32(lambda_))
  assert relative_error(got, reference) <= 1e-4


def test_jit_vmap_loop_and_batched_agree():
  """11 rows and 5,000 tokens fill neither the tiles' rows nor their columns."""
  rows = [case(seed, 5000) for seed in range(11)]
  args = [jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True)]
  lambdas = jnp.asarray(np.random.default_rng(0).random((11, 5000), np.float32))
  loop = np.stack([gae(*jnps(*row), lam) for row, lam in zip(rows, lambdas, strict=True)])
  np.testing.assert_array_equal(loop[0], skip_observation_gae(*jnps(*rows[0]), lambdas[0]))
  vmapped = jax.jit(jax.vmap(skip_observation_gae))(*args, lambdas)
  np.testing.assert_allclose(vmapped, loop, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(batched(*args, lambdas), loop, rtol=1e-5, atol=1e-5)
  scalar = batched(*args, 0.9)
  np.testing.assert_allclose(scalar[3], gae(*(x[3] for x in args), 0.9), rtol=1e-5, atol=1e-5)
  reference = oracle(*rows[5], lambdas[5])
  assert relative_error(loop[5], reference) <= 3e-5


def gradient_case():
  rewards, values, discounts, mask = case(7, 20, splits=0.15)
  lambdas = np.random.default_rng(7).random(20).astype(np.float32)
  cotangent = np.random.default_rng(8).standard_normal(20).astype(np.float32)
  return rewards, values, discounts, mask, lambdas, cotangent


@pytest.mark.parametrize("form", ["scan", "associative", "batched"])
def test_gradient_is_the_closed_form(form):
  """dL/dδ runs forward: D_k = c_k + γ_j λ_j D_j over the action j before; dr = D, dV = γ_j D_j - D."""
  rewards, values, discounts, mask, lambdas, cotangent = gradient_case()
  at = np.flatnonzero(mask)
  d_delta, d_rewards, d_values = 0.0, np.zeros(20), np.zeros(20)
  before = None
  for t in at:
    carried = 0.0 if before is None else discounts[before] * d_delta
    decayed = 0.0 if before is None else carried * lambdas[before]
    d_delta = cotangent[t] + decayed
    d_rewards[t], d_values[t] = d_delta, carried - d_delta
    before = t

  def loss(rewards, values):
    args = rewards, values, *jnps(discounts, mask, lambdas)
    if form == "batched":
      out = batched_skip_observation_gae(*(x[None] for x in args))[0]
    else:
      out = FORMS[form](*args)
    return (jnp.asarray(cotangent) * out).sum()

  got = jax.grad(loss, (0, 1))(*jnps(rewards, values))
  np.testing.assert_allclose(got[0], d_rewards, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(got[1], d_values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["scan", "associative", "batched"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_nothing_leaks_from_under_the_mask(form, bad):
  *arrays, mask, lambdas, cotangent = gradient_case()
  arrays = [*arrays, lambdas]

  def run(arrays):
    def loss(rewards, values, discounts, lambdas):
      args = rewards, values, discounts, jnp.asarray(mask), lambdas
      if form == "batched":
        out = batched_skip_observation_gae(*(x[None] for x in args))[0]
      else:
        out = FORMS[form](*args)
      return (jnp.asarray(cotangent) * out).sum(), out

    return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(*jnps(*arrays))

  clean = run([np.where(mask, x, np.float32(0)) for x in arrays])
  dirty = run([np.where(mask, x, np.float32(bad)) for x in arrays])
  for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_degenerate_rows(form):
  run = FORMS[form]
  ones, some = np.ones(6, np.float32), np.array([0, 0, 1, 0, 0, 0], bool)
  discounts = np.zeros(6, np.float32)
  nothing = run(*jnps(ones, ones, ones, np.zeros(6, bool)), jnp.float32(0.9))
  np.testing.assert_array_equal(nothing, np.zeros(6))
  single = run(*jnps(ones, 0.25 * ones, discounts, some), jnp.float32(0.9))
  np.testing.assert_allclose(single, [0, 0, 0.75, 0, 0, 0])
  one_token = run(*jnps(ones[:1], 0.25 * ones[:1], discounts[:1], ones[:1] > 0), jnp.float32(0.9))
  np.testing.assert_allclose(one_token, [0.75])


@pytest.mark.parametrize("form", FORMS)
def test_row_that_ends_on_an_observation_keeps_its_whole_reward(form):
  mask = np.array([0, 1, 1, 0, 1, 0, 0, 0], bool)
  rewards = np.array([0, 0, 0, 0, 1, 0, 0, 0], np.float32)
  discounts = np.array([1, 1, 1, 1, 0, 1, 1, 1], np.float32)
  got = FORMS[form](*jnps(rewards, np.zeros(8, np.float32), discounts, mask), jnp.float32(1.0))
  np.testing.assert_array_equal(got, mask.astype(np.float32))


def test_packed_trajectories_do_not_see_each_other():
  first, second = case(4, 17, splits=0), case(5, 23, splits=0)
  for row in (first, second):
    row[2][np.flatnonzero(row[3])[-1]] = 0.0
  alone = [gae(*jnps(*row), 0.97) for row in (first, second)]
  packed = [np.concatenate(x) for x in zip(first, second, strict=True)]
  np.testing.assert_allclose(gae(*jnps(*packed), 0.97), np.concatenate(alone), rtol=1e-6, atol=1e-6)
  packed[1][17:] += 100.0  # the second trajectory's values
  np.testing.assert_allclose(gae(*jnps(*packed), 0.97)[:17], alone[0], rtol=1e-6, atol=1e-6)


# --- Step level ---


def test_step_level_worked_number():
  """Two turns, rewards 1 + 2 and 4, last values .5 and 1, γ = 1, λ = .5: Â = 3, and 3.5 + .5 · 3."""
  rewards = jnp.array([0.0, 1.0, 2.0, 9.0, 0.0, 4.0])
  values = jnp.array([0.0, 0.1, 0.5, 9.0, 3.0, 1.0])
  mask = jnp.array([False, True, True, False, True, True])
  discounts = jnp.array([1.0, 1, 1, 1, 1, 0])
  got = step_level_gae(rewards, values, discounts, mask, 0.5)
  np.testing.assert_allclose(got, [0, 5, 5, 0, 3, 3])
  got = step_level_gae(rewards, values, discounts, mask, 0.5, reduce="mean")
  np.testing.assert_allclose(got, [0, 3 + 2 - 0.3 + 1, 5.7, 0, 2, 2], rtol=1e-6)
  with pytest.raises(ValueError, match="reduce = 'first'"):
    step_level_gae(rewards, values, discounts, mask, 0.5, reduce="first")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), mean=st.booleans())
def test_step_level_equals_a_loop_over_turns(seed, mean):
  rewards, values, discounts, mask = case(seed, 48, splits=0)
  turns = np.split(np.arange(48), np.flatnonzero(np.diff(mask.astype(int))) + 1)
  turns = [turn for turn in turns if mask[turn[0]]]
  per_turn = [np.array([rewards[t].sum(dtype=np.float64) for t in turns])]
  per_turn += [np.array([values[t].mean() if mean else values[t[-1]] for t in turns])]
  per_turn += [np.array([discounts[t[-1]] for t in turns])]
  result = oracle(*per_turn, np.ones(len(turns), bool), np.float32(0.9))
  reference = np.zeros(48)
  for turn, advantage in zip(turns, result, strict=True):
    reference[turn] = advantage
  got = step_level[mean](*jnps(rewards, values, discounts, mask), jnp.float32(0.9))
  assert relative_error(got, reference) <= 3e-5


step_level = {
  False: jax.jit(lambda *args: step_level_gae(*args, reduce="last")),
  True: jax.jit(lambda *args: step_level_gae(*args, reduce="mean")),
}


def test_step_level_of_single_token_turns_is_token_level():
  rewards, values, discounts, _ = case(9, 48, splits=0)
  mask = np.arange(48) % 3 == 1
  args = jnps(rewards, values, discounts, mask)
  lam = jnp.float32(0.9)
  np.testing.assert_allclose(step_level[False](*args, lam), gae(*args, lam), rtol=1e-5, atol=1e-6)


def test_step_level_ignores_what_is_under_the_mask_and_vmaps():
  rewards, values, discounts, mask = case(10, 48)
  dirty = [np.where(mask, x, np.float32(np.nan)) for x in (rewards, values, discounts)]
  args = [jnp.asarray(np.stack([a, b])) for a, b in zip((rewards, values, discounts), dirty)]
  masks = jnp.asarray(np.stack([mask, mask]))
  got = jax.vmap(lambda *a: step_level_gae(*a, 0.9, reduce="mean"))(*args, masks)
  np.testing.assert_array_equal(got[0], got[1])
  one = step_level_gae(*jnps(rewards, values, discounts, mask), 0.9, reduce="mean")
  np.testing.assert_allclose(got[0], one, rtol=1e-5, atol=1e-6)


# --- λ, groups, running mean ---


def test_length_adaptive_lambda():
  lengths = jnp.array([0, 1, 2, 100, 342, 131072])
  got = length_adaptive_lambda(lengths)
  expected = [0.0, 1 / 3, 2 / 3, 1 - 1 / 150, 1 - 1 / 513, 1 - 1 / 196608]
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  assert got.dtype == jnp.float32
  assert float(got[-1]) < 1.0
  assert float(length_adaptive_lambda(jnp.array([1]), alpha=0.5)[0]) == 0.0


def test_group_relative_worked_number():
  """(1, 3) has mean 2 and population std 1; a group of one gives 0; out of range gives 0."""
  returns = jnp.array([1.0, 3.0, 5.0, 7.0, 7.0, 4.0])
  group = jnp.array([0, 0, 1, 2, 2, -1])
  got = group_relative(returns, group, 3)
  np.testing.assert_allclose(got, [-1, 1, 0, 0, 0, 0], atol=1e-5)
  raw = group_relative(2 * returns, group, 3, scale="none")
  np.testing.assert_allclose(raw, [-2, 2, 0, 0, 0, 0])
  with pytest.raises(ValueError, match="scale = 'max'"):
    group_relative(returns, group, 3, scale="max")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_group_relative_equals_a_loop(seed):
  rng = np.random.default_rng(seed)
  returns = rng.standard_normal(16).astype(np.float32)
  group = rng.integers(0, 5, 16)
  reference = np.zeros(16)
  for g in range(5):
    at = group == g
    if at.any():
      chosen = returns[at].astype(np.float64)
      reference[at] = (chosen - chosen.mean()) / (chosen.std() + 1e-6)
  got = group_relative(*jnps(returns, group.astype(np.int32)), 5)
  np.testing.assert_allclose(got, reference, atol=1e-4)


def test_running_mean_baseline():
  """Own window, else the run's, else the return itself (advantage 0)."""
  returns = jnp.array([1.0, 2.0])
  window = jnp.array([[3.0, 5.0, jnp.nan], [jnp.nan] * 3])
  run, count = jnp.array([1.0, 2.0, 6.0, 9.0]), jnp.array([2, 0])
  got = running_mean_baseline(returns, window, count, run, jnp.int32(3))
  np.testing.assert_allclose(got, [4.0, 3.0])
  got = running_mean_baseline(returns, window, count, run, jnp.int32(0))
  np.testing.assert_allclose(got, [4.0, 2.0])
