"""The feed-forward part of a layer: dense SwiGLU, or a dropless mixture of SwiGLU experts.

Nothing is ever dropped by capacity: a token's log-prob must not depend on its neighbours.  Three
forms compute the same function: ``dense`` (every expert on every token, the oracle), ``blocks``
(choices sorted by expert and cut into blocks of rows; the quick one on CPU) and ``ragged_dot``
(XLA's grouped matmul; on CPU it does E times the work).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models.layers import Params, linear, swiglu

F32 = jnp.float32
SMALLEST_QUARTER = 32  # rows; a matmul of fewer runs at less than full speed on CPU


def route(
  x: Float[Array, "N D"], router: Float[Array, "D E"], k: int
) -> tuple[Float[Array, "N k"], Int[Array, "N k"], Float[Array, "N E"]]:
  """softmax → top-k → renormalise, in float32.  Returns weights, experts, all probabilities."""
  logits = jnp.matmul(x.astype(F32), router.astype(F32), precision=jax.lax.Precision.HIGHEST)
  probs = jax.nn.softmax(logits, -1)
  weights, experts = jax.lax.top_k(probs, k)
  return weights / weights.sum(-1, keepdims=True), experts, probs


def _dot(a: Array, b: Array) -> Array:
  return jnp.matmul(a, b, preferred_element_type=F32)


def dense_experts(
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  w_gate_up: Float[Array, "E D F2"],
  w_down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
  """Every expert on every token: E/k times the work.  The oracle of the other forms."""
  one_hot = jax.nn.one_hot(experts, w_gate_up.shape[0], dtype=F32)
  combine = jnp.einsum("nk,nke->ne", weights, one_hot)
  # Batched matmuls over e: as einsums of two dimensions each, XLA would transpose all weights first.
  every = jnp.broadcast_to(x, (w_gate_up.shape[0], *x.shape))
  z = swiglu(_dot(every, w_gate_up.astype(x.dtype)).astype(x.dtype))
  y = _dot(z * combine.T.astype(x.dtype)[..., None], w_down.astype(x.dtype))
  return y.sum(0).astype(x.dtype)


def ragged_experts(
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  experts: Int[Array, "N k"],
  w_gate_up: Float[Array, "E D F2"],
  w_down: Float[Array, "E F D"],
) -> Float[Array, "N D"]:
  """Choices sorted by expert, then two grouped matmuls.  For GPU, and TPU from jax 0.12."""
  n, k = experts.shape
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=w_gate_up.shape[0])
  dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, preferred_element_type=F32)
  z = dot(x[order // k], w_gate_up.astype(x.dtype)).astype(x.dtype)
  y = dot(swiglu(z), w_down.astype(x.dtype))
  y = y[jnp.argsort(order)].reshape(n, k, -1)  # back by a gather: its gradient is one row each
  return jnp.einsum("nk,nkd->nd", weights, y).astype(x.dtype)


class BlockPlan(NamedTuple):
  """Choices in the order of their experts: a row is a choice, an expert has consecutive rows.

  ``choice[row]`` is the flat (token, choice) index of a row, N·k past the last one;
  ``row[n, j]`` is the row of a choice, past the end for dead tokens: inverse maps of each other, so
  that dispatch and combine are gathers in both directions.  The first ``used`` of ``expert``, in
  ascending order, are those with rows: ``size`` of them from ``first`` on, by expert.
  """

  choice: Int[Array, "R"]
  row: Int[Array, "N k"]
  expert: Int[Array, "E"]
  used: Int[Array, ""]
  first: Int[Array, "E"]
  size: Int[Array, "E"]


def plan_blocks(
  experts: Int[Array, "N k"], live: Bool[Array, "N"], num_experts: int, block: int
) -> BlockPlan:
  """Sorts choices by expert; dead tokens get no row.  ``block`` rows of room follow the last."""
  n, k = experts.shape
  flat = jnp.where(live[:, None], experts, num_experts).reshape(-1)
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  size = jnp.bincount(flat, length=num_experts)
  row = jnp.zeros((n * k,), jnp.int32).at[order].set(jnp.arange(n * k, dtype=jnp.int32))
  row = jnp.where(live[:, None], row.reshape(n, k), n * k + block)
  choice = jnp.pad(order, (0, block), constant_values=n * k)
  expert = jnp.argsort(size == 0, stable=True)
  return BlockPlan(choice, row, expert, (size > 0).sum(), jnp.cumsum(size) - size, size)


def _rows(x: Array, index: Array) -> Array:
  """x[index], zeros where the index is past the end."""
  return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def _some_rows(x: Array, index: Array) -> Array:
  """x[index], any row where the index is past the end: for rows whose result has weight 0."""
  return jnp.take(x, index, axis=0, mode="clip")


def _transposed_dot(a: Array, b: Array) -> Array:
  """aᵀ·b.  The barrier keeps XLA from folding the transpose into the matmul, which on CPU then runs
  at 0.6 times the speed; the copy is small."""
  return _dot(jax.lax.optimization_barrier(a.T), b)


def _get(x: Array, at: Array, size: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, at, size, 0)


def _put(x: Array, y: Array, at: Array) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), at, 0)


def _each_block(
  first: Array, rows: Array, block: int, body: Callable[[Array, int, Any], Any], carry: Any
) -> Any:
  """carry = body(first row, number of rows, carry) for the blocks of one expert.

  Whole blocks, then quarters: the weight gradient wants many rows at a time, the rest little waste.
  The last one runs over into the rows of the next expert, which writes them after it.
  """
  for size, count in _block_sizes(rows, block):
    start = first

    def step(i: Array, carry: Any, start: Array = start, size: int = size) -> Any:
      return body(start + i * size, size, carry)

    carry = jax.lax.fori_loop(0, count, step, carry)
    first = first + count * size
  return carry


def _block_sizes(rows: Array, block: int) -> list[tuple[int, Array]]:
  quarter = block // 4
  if quarter < SMALLEST_QUARTER:
    return [(block, -(-rows // block))]
  return [(block, rows // block), (quarter, -(-(rows % block) // quarter))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def block_experts(
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  w_gate_up: Float[Array, "E D F2"],
  w_down: Float[Array, "E F D"],
  plan: BlockPlan,
  block: int,
) -> Float[Array, "N D"]:
  """A loop over the used experts and, inside, one over the blocks of each, with two matmuls.

  Two loops, because XLA copies the weights it slices: once an expert, not once a block.
  """
  return _block_forward(x, weights, w_gate_up, w_down, plan, block, keep=False)[0]


def _block_forward(x, weights, w_gate_up, w_down, plan, block, keep=True):
  k, rows = weights.shape[1], plan.choice.shape[0]

  def expert(i, carry):
    e = plan.expert[i]
    gate_up, down = w_gate_up[e], w_down[e]

    def body(at, size, carry):
      y, kept = carry
      xi = _some_rows(x, _get(plan.choice, at, size) // k)
      zi = _dot(xi, gate_up).astype(x.dtype)
      yi = _dot(swiglu(zi), down)
      return _put(y, yi, at), _put(kept, zi, at) if keep else kept

    return _each_block(plan.first[e], plan.size[e], block, body, carry)

  y = jnp.zeros((rows, x.shape[1]), x.dtype)
  kept = jnp.zeros((rows, w_gate_up.shape[2]) if keep else (), x.dtype)
  y, kept = jax.lax.fori_loop(0, plan.used, expert, (y, kept))
  return _combine(y, weights, plan), (x, weights, w_gate_up, w_down, plan, kept)


def _combine(y: Array, weights: Array, plan: BlockPlan) -> Array:
  chosen = _rows(y, plan.row.reshape(-1)).reshape(*plan.row.shape, -1)
  return (weights[..., None] * chosen.astype(F32)).sum(1).astype(y.dtype)


def _block_backward(block: int, residuals: Any, g: Array):
  """Per block: one recomputed activation, four matmuls; y itself is never needed.

  ∂/∂weight of a row is ⟨g, swiglu(z)·w_down⟩ = ⟨g·w_downᵀ, swiglu(z)⟩.
  """
  x, weights, w_gate_up, w_down, plan, kept = residuals
  k, rows = weights.shape[1], plan.choice.shape[0]

  def expert(i, carry):
    e = plan.expert[i]
    gate_up, down, end = w_gate_up[e], w_down[e], plan.first[e] + plan.size[e]

    def body(at, size, carry):
      gx, g_weight, g_gate_up, g_down = carry
      choice, own = _get(plan.choice, at, size), at + jnp.arange(size) < end
      xi, gi = _some_rows(x, choice // k), _some_rows(g, choice // k)
      wi = jnp.where(own, _some_rows(weights.reshape(-1), choice), 0.0)[:, None]
      a, pull = jax.vjp(swiglu, _get(kept, at, size))
      ga = _dot(gi, down.T)
      (gz,) = pull((ga * wi).astype(x.dtype))
      g_weight = _put(g_weight, (ga * a.astype(F32)).sum(-1), at)
      g_down = g_down.at[e].add(_transposed_dot(a, (gi.astype(F32) * wi).astype(x.dtype)))
      g_gate_up = g_gate_up.at[e].add(_transposed_dot(xi, gz))
      return _put(gx, _dot(gz, gate_up.T), at), g_weight, g_gate_up, g_down

    return _each_block(plan.first[e], plan.size[e], block, body, carry)

  carry = (
    jnp.zeros((rows, x.shape[1]), x.dtype),
    jnp.zeros((rows,), F32),
    jnp.zeros(w_gate_up.shape, F32),
    jnp.zeros(w_down.shape, F32),
  )
  gx, g_weight, g_gate_up, g_down = jax.lax.fori_loop(0, plan.used, expert, carry)
  flat = plan.row.reshape(-1)
  gx = _rows(gx, flat).reshape(*plan.row.shape, -1).astype(F32).sum(1).astype(x.dtype)
  g_weight = _rows(g_weight, flat).reshape(plan.row.shape)
  return gx, g_weight, g_gate_up.astype(w_gate_up.dtype), g_down.astype(w_down.dtype), None


block_experts.defvjp(_block_forward, _block_backward)


def split_experts(
  x: Float[Array, "N D"],
  weights: Float[Array, "N k"],
  w_gate_up: tuple[Float[Array, "D F2"], ...],
  w_down: tuple[Float[Array, "F D"], ...],
  plan: BlockPlan,
  block: int,
) -> Float[Array, "N D"]:
  """``block_experts`` on one array per expert, which are read in place; an unused one costs nothing.

  For decoding, where the copies of sliced weights would take nearly half of the time.
  """
  y = jnp.zeros((plan.choice.shape[0], x.shape[1]), x.dtype)
  for e, (gate_up, down) in enumerate(zip(w_gate_up, w_down, strict=True)):

    def body(at: Array, size: int, y: Array, gate_up: Array = gate_up, down: Array = down) -> Array:
      xi = _some_rows(x, _get(plan.choice, at, size) // weights.shape[1])
      return _put(y, _dot(swiglu(_dot(xi, gate_up).astype(x.dtype)), down), at)

    # An empty loop is not enough: with one token XLA moves the matmuls out of it.
    run = functools.partial(_each_block, plan.first[e], plan.size[e], block, body)
    y = jax.lax.cond(plan.size[e] > 0, run, lambda y: y, y)
  return _combine(y, weights, plan)


def router_counts(
  probs: Float[Array, "N E"], experts: Int[Array, "N k"], live: Bool[Array, "N"]
) -> dict[str, Array]:
  """Choices and probability mass per expert over live tokens; what router statistics are made of."""
  ones = jnp.broadcast_to(live[:, None], experts.shape).astype(F32)
  choices = jnp.zeros((probs.shape[1],), F32).at[experts].add(ones)
  return {"choices": choices, "probs": jnp.where(live[:, None], probs, 0.0).sum(0)}


def moe_form(config: ModelConfig) -> str:
  """The form that ``moe_impl`` stands for on this back end."""
  if config.moe_impl != "auto":
    return config.moe_impl
  return "blocks" if jax.default_backend() == "cpu" else "ragged_dot"


def feed_forward(
  config: ModelConfig, p: Params, x: Float[Array, "N D"], live: Bool[Array, "N"], block: int
) -> tuple[Float[Array, "N D"], dict[str, Array]]:
  """The layer's feed-forward part on flat tokens.

  ``live`` is False for padding, whose output means nothing and costs nothing in ``blocks``.
  Experts may come as tuples of one array each (``split_experts``; no gradient).  Raises ValueError
  for an unknown form.
  """
  if not config.num_experts:
    return linear(swiglu(linear(x, p["w_gate_up"])), p["w_down"]), {}
  weights, experts, probs = route(x, p["router"], config.experts_per_token)
  counts = router_counts(probs, experts, live)
  if isinstance(p["w_gate_up"], tuple):
    plan = plan_blocks(experts, live, config.num_experts, block)
    return split_experts(x, weights, p["w_gate_up"], p["w_down"], plan, block), counts
  w_gate_up, w_down = p["w_gate_up"].astype(x.dtype), p["w_down"].astype(x.dtype)
  match moe_form(config):
    case "dense":
      y = dense_experts(x, weights, experts, w_gate_up, w_down)
    case "ragged_dot":
      y = ragged_experts(x, weights, experts, w_gate_up, w_down)
    case "blocks":
      plan = plan_blocks(experts, live, config.num_experts, block)
      y = block_experts(x, weights, w_gate_up, w_down, plan, block)
    case form:
      raise ValueError(f"moe_impl = {form!r}: choose one of auto, dense, blocks, ragged_dot")
  return y, counts
