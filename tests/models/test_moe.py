"""Forms of the experts against the dense oracle, and the router's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig
from sao_jax.models import moe

N, D, E, F, K = 37, 16, 4, 24, 2  # N · K is no multiple of any block


def _value_and_gradients(form, experts, n=N):
  keys = jax.random.split(jax.random.key(0), 5)
  x = jax.random.normal(keys[0], (n, D))
  router = jax.random.normal(keys[1], (D, E))
  w_gate_up = 0.2 * jax.random.normal(keys[2], (E, D, 2 * F))
  w_down = 0.2 * jax.random.normal(keys[3], (E, F, D))
  cotangent = jax.random.normal(keys[4], (n, D))

  def loss(x, router, w_gate_up, w_down):
    weights, chosen, _ = moe.route(x, router, K)
    if experts is not None:
      chosen = jnp.broadcast_to(jnp.asarray(experts)[None], chosen.shape)
    if isinstance(form, int):
      plan = moe.plan_blocks(chosen, jnp.ones(n, bool), E, form)
      y = moe.block_experts(x, weights, w_gate_up, w_down, plan, form)
    else:
      y = getattr(moe, f"{form}_experts")(x, weights, chosen, w_gate_up, w_down)
    return (y * cotangent).sum(), y

  f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
  return f(x, router, w_gate_up, w_down)


@pytest.mark.parametrize("experts", [None, [2, 0]], ids=["routed", "two experts get every token"])
def test_forms_equal_the_dense_oracle_in_value_and_gradient(experts):
  reference = _value_and_gradients("dense", experts)
  for form in ("ragged", 8, 128):
    result = _value_and_gradients(form, experts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, reference)


@pytest.mark.parametrize("experts", [None, [3, 1]], ids=["routed", "two experts get every token"])
def test_whole_blocks_and_then_quarters(experts):
  """Of 300 rows an expert has two blocks of 128 and two of 32, the last of which is not full."""
  assert moe.SMALLEST_QUARTER <= 32
  reference = _value_and_gradients("dense", experts, 300)
  result = _value_and_gradients(128, experts, 300)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), result, reference)


def test_dense_form_is_the_weighted_sum_over_chosen_experts():
  keys = jax.random.split(jax.random.key(1), 4)
  x, router = jax.random.normal(keys[0], (3, D)), jax.random.normal(keys[1], (D, E))
  wg, wd = jax.random.normal(keys[2], (E, D, 2 * F)), jax.random.normal(keys[3], (E, F, D))
  weights, experts, probs = (np.asarray(a) for a in moe.route(x, router, K))
  np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
  top = np.sort(np.asarray(probs), 1)[:, ::-1][:, :K]
  np.testing.assert_allclose(weights, top / top.sum(1, keepdims=True), rtol=1e-6)
  y = moe.dense_experts(x, jnp.asarray(weights), jnp.asarray(experts), wg, wd)
  for n in range(3):
    want = np.zeros(D)
    for w, e in zip(weights[n], experts[n], strict=True):
      z = np.asarray(x[n], np.float64) @ np.asarray(wg[e], np.float64)
      gate, up = z[:F], z[F:]
      want += w * ((gate / (1 + np.exp(-gate)) * up) @ np.asarray(wd[e], np.float64))
    np.testing.assert_allclose(y[n], want, rtol=1e-4, atol=1e-4)


def test_dead_tokens_have_no_row_and_change_no_other():
  experts = jnp.array([[0, 1], [0, 2], [3, 0], [1, 2]])
  live = jnp.array([True, False, True, False])
  plan = moe.plan_blocks(experts, live, E, 2)
  assert int(plan.used) == 3  # expert 0 has two rows, experts 1 and 3 one each
  assert plan.expert[:3].tolist() == [0, 1, 3]
  assert (plan.first[plan.expert[:3]].tolist(), plan.size.tolist()) == ([0, 2, 3], [2, 1, 0, 1])
  rows = np.asarray(plan.row)
  assert (rows[[1, 3]] >= plan.choice.shape[0]).all()
  choices = np.asarray(plan.choice)
  assert [int(choices[r]) for r in rows[[0, 2]].reshape(-1)] == [0, 1, 4, 5]


def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit():
  d, f, n, block = 64, 128, 32, 8
  keys = jax.random.split(jax.random.key(2), 4)
  x, router = jax.random.normal(keys[0], (n, d)), jax.random.normal(keys[1], (d, E))
  config = ModelConfig(d_model=d, d_ff=f, num_experts=E, moe_impl="blocks")
  p = {
    "router": router,
    "w_gate_up": 0.2 * jax.random.normal(keys[2], (E, d, 2 * f)),
    "w_down": 0.2 * jax.random.normal(keys[3], (E, f, d)),
  }
  layer = jax.jit(lambda x, live: moe.feed_forward(config, p, x, live, block)[0])
  base = np.asarray(layer(x, jnp.ones(n, bool)))
  for seed in range(8):
    order = np.random.default_rng(seed).permutation(n)
    np.testing.assert_array_equal(layer(x[order], jnp.ones(n, bool)), base[order])
    others = x.at[4:].set(jax.random.normal(jax.random.key(seed), (n - 4, d)))
    np.testing.assert_array_equal(layer(others, jnp.arange(n) < 4 + seed)[:4], base[:4])


def test_an_unknown_form_is_refused():
  config = ModelConfig(moe_impl="capacity")
  x = jnp.zeros((2, 8))
  p = {
    "router": jnp.zeros((8, 4)),
    "w_gate_up": jnp.zeros((4, 8, 8)),
    "w_down": jnp.zeros((4, 4, 8)),
  }
  with pytest.raises(ValueError, match=r"moe_impl = 'capacity'.*ragged_dot"):
    moe.feed_forward(config, p, x, jnp.ones(2, bool), 8)
