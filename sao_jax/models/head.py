"""Vocabulary head: token log-probs, entropy and loss, without ever holding all logits at once.

Positions that count are gathered to the front, then cut into chunks whose logits fit a budget of
bytes; the loop ends with the last chunk that holds such a position.  Long prompts therefore cost
nothing here.  Both functions bring their own gradient:

* ``token_loss`` makes loss and gradient together inside the chunk: three matmuls, no recompute;
* ``token_statistics`` keeps three numbers per token and recomputes logits backwards: four matmuls.

With z = logits / temperature, p = softmax(z), L = log p[target] and entropy S:
∂L/∂z = onehot − p and ∂S/∂z = −p · (log p + S).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

F32 = jnp.float32
SLABS = 4  # the budget over a chunk's logits: their gradient and head-sized sums need room too

LossFn = Callable[[Array, Any], tuple[Array, dict[str, Array]]]


class Chunks(NamedTuple):
  """``places[g, i]``: the i-th position to compute in group g (past the end: none); ``used`` chunks."""

  places: Int[Array, "G M"]
  used: Int[Array, ""]


def _spread_over_devices() -> bool:
  return not jax.sharding.get_abstract_mesh().empty


def _plan(mask: Bool[Array, "G N"], vocab: int, budget_mb: int) -> tuple[Chunks, int]:
  """Positions under the mask first, and how many of them make a chunk."""
  groups, n = mask.shape
  fits = max(1, budget_mb * 2**20 // (4 * SLABS * vocab * groups))
  size = n if fits >= n else (fits // 8 * 8 if fits >= 8 else fits)
  order = jnp.argsort(~mask, axis=1, stable=True)
  order = jnp.where(jnp.take_along_axis(mask, order, 1), order, n)
  order = jnp.pad(order, ((0, 0), (0, -n % size)), constant_values=n)
  used = -(-mask.sum(1).max() // size)
  return Chunks(order, used), size


def _flatten(tree: Any, mask: Bool[Array, "B T"]) -> tuple[Any, Bool[Array, "G N"]]:
  """One group of all tokens; one group a row under a mesh, so that no row leaves its device."""
  if _spread_over_devices():
    return tree, mask
  return jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), tree), mask.reshape(1, -1)


def _take(x: Array, index: Int[Array, "G C"]) -> Array:
  return jax.vmap(lambda a, i: jnp.take(a, i, axis=0, mode="fill", fill_value=0))(x, index)


def _put(x: Array, index: Int[Array, "G C"], y: Array) -> Array:
  put = jax.vmap(lambda a, i, b: a.at[i].set(b.astype(a.dtype), mode="drop", unique_indices=True))
  return put(x, index, y)


def _slice(chunks: Chunks, i: Array, size: int) -> Int[Array, "G C"]:
  return jax.lax.dynamic_slice_in_dim(chunks.places, i * size, size, 1)


# The slab of a chunk is [G·C, V]: XLA's CPU reductions over three axes take several times as long.


def _raw_logits(h: Array, head: Array) -> Array:
  """Logits before the temperature, which later passes take in for nothing."""
  return jnp.einsum("nd,dv->nv", h, head, preferred_element_type=F32)


def _scores(raw: Array, target: Array, scale: Array) -> tuple[Array, Array, Array, Array]:
  """(log p[target], entropy, max raw, log Σ exp(z − max z)) of logits z = raw · scale."""
  top = raw.max(-1)
  shifted = raw - top[:, None]
  weight = jnp.exp(shifted * scale[:, None])
  total = weight.sum(-1)
  picked = jnp.take_along_axis(raw, target[:, None], -1)[:, 0]
  # log Σ − ⟨shifted⟩ rather than log Σ − ⟨z⟩: no cancellation of two large numbers
  mean = jnp.einsum("nv,nv->n", weight, shifted, preferred_element_type=F32) / total
  log_total = jnp.log(total)
  return (picked - top) * scale - log_total, log_total - scale * mean, top, log_total


def _log_softmax(raw: Array, scale: Array, top: Array, log_total: Array) -> Array:
  """log p of logits z = raw · scale.

  The maximum is taken out before the temperature comes in: at T = 1e-3 raw · scale is in the
  thousands, and its rounding would be an error of 1e-3 in p.
  """
  return (raw - top[:, None]) * scale[:, None] - log_total[:, None]


def _pull_back(gz: Array, h: Array, head: Array, scale: Array) -> tuple[Array, Array]:
  """Gradients of hidden and head from gz = ∂/∂z; both f32."""
  gz = gz.astype(h.dtype)
  gh = jnp.einsum("nv,dv->nd", gz, head, preferred_element_type=F32)
  # XLA's fast CPU matmul contracts rows only: a transposed copy of h costs little beside it.
  columns = jax.lax.optimization_barrier((h * scale[:, None]).astype(h.dtype).T)
  return gh * scale[:, None], jnp.einsum("dn,nv->dv", columns, gz, preferred_element_type=F32)


def _at_target(z: Array, target: Array) -> Array:
  """Onehot as a comparison: fuses into one pass where a scatter would copy the slab."""
  return jax.lax.broadcasted_iota(target.dtype, z.shape, z.ndim - 1) == target[:, None]


def _rows(index: Int[Array, "G C"], *arrays: Array) -> list[Array]:
  """The chunk's rows of each array, groups joined."""
  return [(x := _take(a, index)).reshape(-1, *x.shape[2:]) for a in arrays]


def _put_rows(x: Array, index: Int[Array, "G C"], y: Array) -> Array:
  return _put(x, index, y.reshape(*index.shape, *y.shape[1:]))


def _scale(temperature: Array) -> Array:
  """1 / temperature; rows past the end have none: 1 keeps them finite."""
  t = temperature.astype(F32)
  return 1.0 / jnp.where(t > 0, t, 1.0)


# ---- log-probs and entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _statistics(hidden, head, targets, temperature, chunks, size):
  return _statistics_forward(hidden, head, targets, temperature, chunks, size)[0]


def _statistics_forward(hidden, head, targets, temperature, chunks, size):
  def body(i, out):
    index = _slice(chunks, i, size)
    h, target, temp = _rows(index, hidden, targets, temperature)
    new = _scores(_raw_logits(h, head), target, _scale(temp))
    return tuple(_put_rows(a, index, b) for a, b in zip(out, new, strict=True))

  zeros = jnp.zeros(targets.shape, F32)
  out = jax.lax.fori_loop(0, chunks.used, body, (zeros,) * 4)
  return out[:2], (hidden, head, targets, temperature, chunks, *out[1:])


def _statistics_backward(size, residuals, cotangents):
  hidden, head, targets, temperature, chunks, entropy, top, log_total = residuals

  def body(i, carry):
    gh, gw = carry
    index = _slice(chunks, i, size)
    h, target, temp = _rows(index, hidden, targets, temperature)
    c_logp, c_entropy, entropies = (x[:, None] for x in _rows(index, *cotangents, entropy))
    scale = _scale(temp)
    logp = _log_softmax(_raw_logits(h, head), scale, *_rows(index, top, log_total))
    gz = -jnp.exp(logp) * (c_logp + c_entropy * (logp + entropies))
    gz = gz + jnp.where(_at_target(gz, target), c_logp, 0.0)
    new_gh, new_gw = _pull_back(gz, h, head, scale)
    return _put_rows(gh, index, new_gh), gw + new_gw

  zeros = jnp.zeros_like(hidden), jnp.zeros(head.shape, F32)
  gh, gw = jax.lax.fori_loop(0, chunks.used, body, zeros)
  return gh, gw.astype(head.dtype), None, None, None


_statistics.defvjp(_statistics_forward, _statistics_backward)


def token_statistics(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  budget_mb: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """log p[targets] and entropy (nats) of softmax(hidden · head / temperature); 0 off mask.

  Differentiable in hidden and head.  ``budget_mb`` bounds the logits held at once, in MiB.
  """
  flat, flat_mask = _flatten((hidden, targets, temperature), mask)
  chunks, size = _plan(flat_mask, head.shape[1], budget_mb)
  logprobs, entropy = _statistics(flat[0], head.astype(hidden.dtype), *flat[1:], chunks, size)
  return logprobs.reshape(mask.shape), entropy.reshape(mask.shape)


# ---- loss


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _loss(hidden, head, targets, temperature, extras, chunks, size, loss_fn):
  return _loss_chunks(
    hidden, head, targets, temperature, extras, chunks, size, loss_fn, gradient=False
  )[0]


def _chunk_loss(loss_fn, logprobs, extras, valid):
  """Loss sum, aux and ∂loss/∂logprobs of one chunk; rows that are not valid count for nothing."""

  def total(lp):
    loss, aux = loss_fn(lp, extras)
    return jnp.where(valid, loss, 0.0).sum(), aux

  (loss, aux), slope = jax.value_and_grad(total, has_aux=True)(logprobs)
  return loss, aux, jnp.where(valid, slope, 0.0)


def _loss_chunks(hidden, head, targets, temperature, extras, chunks, size, loss_fn, gradient=True):
  groups, n = targets.shape
  row = jax.ShapeDtypeStruct((1,), F32)
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1,), x.dtype), extras)
  _, aux = jax.eval_shape(loss_fn, row, like)
  outputs = jax.tree.map(lambda x: jnp.zeros((groups, n), x.dtype), (row, row, aux))

  def body(i, carry):
    total, outputs, gh, gw = carry
    index = _slice(chunks, i, size)
    h, target, temp = _rows(index, hidden, targets, temperature)
    raw, scale = _raw_logits(h, head), _scale(temp)
    logprobs, entropy, top, log_total = _scores(raw, target, scale)
    extra = jax.tree.map(lambda x: _rows(index, x)[0], extras)
    loss, aux, slope = _chunk_loss(loss_fn, logprobs, extra, (index < n).reshape(-1))
    outputs = jax.tree.map(lambda a, b: _put_rows(a, index, b), outputs, (logprobs, entropy, aux))
    if gradient:
      p = jnp.exp(_log_softmax(raw, scale, top, log_total))
      new_gh, new_gw = _pull_back((_at_target(raw, target) - p) * slope[:, None], h, head, scale)
      gh, gw = _put_rows(gh, index, new_gh), gw + new_gw
    return total + loss, outputs, gh, gw

  gh = jnp.zeros(hidden.shape if gradient else (), hidden.dtype)
  gw = jnp.zeros(head.shape if gradient else (), F32)
  start = (jnp.zeros((), F32), outputs, gh, gw)
  total, outputs, gh, gw = jax.lax.fori_loop(0, chunks.used, body, start)
  return (total, outputs), (gh, gw)


def _loss_forward(hidden, head, targets, temperature, extras, chunks, size, loss_fn):
  out, (gh, gw) = _loss_chunks(hidden, head, targets, temperature, extras, chunks, size, loss_fn)
  return out, (gh, gw.astype(head.dtype))


def _loss_backward(size, loss_fn, residuals, cotangents):
  gh, gw = residuals
  c = cotangents[0]
  return (c * gh).astype(gh.dtype), (c * gw).astype(gw.dtype), None, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


def token_loss(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  targets: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  extras: Any,
  loss_fn: LossFn,
  budget_mb: int,
) -> tuple[Float[Array, ""], dict[str, Array]]:
  """Σ over mask of loss_fn(logprobs "n", extras "n") → (loss "n", aux dict of "n"), elementwise.

  Returns the sum and {"logprobs", "entropy", aux…} ("B T", 0 off mask).  Only the sum has a
  gradient, to hidden and head; it is made in the forward pass.
  """
  flat, flat_mask = _flatten((hidden, targets, temperature, extras), mask)
  chunks, size = _plan(flat_mask, head.shape[1], budget_mb)
  total, (logprobs, entropy, aux) = _loss(
    flat[0], head.astype(hidden.dtype), *flat[1:], chunks, size, loss_fn
  )
  outputs = {"logprobs": logprobs, "entropy": entropy, **aux}
  return total, {k: jax.lax.stop_gradient(v.reshape(mask.shape)) for k, v in outputs.items()}
