"""RMSNorm, rotary positions, SwiGLU and grouped-query attention as functions of parameter dicts.

Training and decoding call the same functions here, so that they cannot drift apart.  Matrices are
multiplied in ``compute_dtype`` and accumulated in float32; norms and softmax run in float32.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig

MASKED = -1e30  # a masked attention score; finite, so that a row without any key stays finite

Params = Mapping[str, Any]


def linear(x: Float[Array, "... D"], w: Float[Array, "D F"]) -> Float[Array, "... F"]:
  """x · w in x's dtype, accumulated in float32."""
  dims = (((x.ndim - 1,), (0,)), ((), ()))
  y = jax.lax.dot_general(x, w.astype(x.dtype), dims, preferred_element_type=jnp.float32)
  return y.astype(x.dtype)


def rms_norm(x: Float[Array, "... D"], w: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
  """w · x / √(mean(x²) + eps), in float32 (arXiv 1910.07467)."""
  h = x.astype(jnp.float32)
  h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)
  return (h * w.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rope_table(
  positions: Int[Array, "..."], head_dim: int, theta: float
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
  """cos and sin of position · theta^(−2i/head_dim) (arXiv 2104.09864), made once for all layers."""
  half = head_dim // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  frequency = frequency.reshape((1,) * positions.ndim + (half,))
  angle = positions.astype(jnp.float32)[..., None] * frequency
  # Without the barrier XLA may compute them inside each rotation, where a vectorised loop and its
  # remainder round differently: the last slots of a decode step then differ in their last bits.
  return jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(
  x: Float[Array, "... H hd"], table: tuple[Float[Array, "... half"], Float[Array, "... half"]]
) -> Float[Array, "... H hd"]:
  """Rotates (x[i], x[i + hd/2]) by the angles of ``table``."""
  cos, sin = table[0][..., None, :], table[1][..., None, :]
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def swiglu(z: Float[Array, "... F2"]) -> Float[Array, "... F"]:
  """silu(gate) · up, where z holds gate and up side by side (arXiv 2002.05202)."""
  gate, up = jnp.split(z, 2, -1)
  return jax.nn.silu(gate) * up


def attention_inputs(
  config: ModelConfig, p: Params, x: Float[Array, "... D"], table: tuple[Array, Array]
) -> tuple[Float[Array, "... H hd"], Float[Array, "... KV hd"], Float[Array, "... KV hd"]]:
  """Queries, keys and values of normalised inputs x, rotated to their positions."""

  def project(name: str, heads: int) -> Array:
    y = linear(x, p["w" + name])
    if config.qkv_bias:
      y = y + p["b" + name].astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
    return y.reshape(*x.shape[:-1], heads, config.head_dim)

  q, k = project("q", config.num_heads), project("k", config.num_kv_heads)
  if config.qk_norm:
    q = rms_norm(q, p["q_norm"], config.norm_eps)
    k = rms_norm(k, p["k_norm"], config.norm_eps)
  return rotate(q, table), rotate(k, table), project("v", config.num_kv_heads)


def dot_attention(
  q: Float[Array, "B T H hd"],
  k: Float[Array, "B S KV hd"],
  v: Float[Array, "B S KV hd"],
  mask: Bool[Array, "B T S"],
) -> Float[Array, "B T H hd"]:
  """softmax(q·k / √hd) · v with query heads stacked on their key head: plain batched matmuls."""
  b, t, h, hd = q.shape
  s, kv = k.shape[1], k.shape[2]
  g = h // kv
  q = q.reshape(b, t, kv, g, hd).transpose(0, 2, 3, 1, 4).reshape(b * kv, g * t, hd)
  k, v = (z.transpose(0, 2, 1, 3).reshape(b * kv, s, hd) for z in (k, v))
  scores = jnp.einsum("bqd,bsd->bqs", q, k, preferred_element_type=jnp.float32) * hd**-0.5
  scores = jnp.where(mask[:, None, None], scores.reshape(b, kv, g, t, s), MASKED)
  weights = jax.nn.softmax(scores, -1).astype(q.dtype).reshape(b * kv, g * t, s)
  out = jnp.einsum("bqs,bsd->bqd", weights, v, preferred_element_type=jnp.float32)
  out = out.astype(q.dtype).reshape(b, kv, g, t, hd)
  return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, hd)


class Softmax(NamedTuple):
  """A softmax-weighted sum over the keys seen so far (arXiv 2112.05682)."""

  top: Float[Array, "R Q"]
  total: Float[Array, "R Q"]
  sum: Float[Array, "R Q hd"]

  @classmethod
  def start(cls, rows: int, queries: int, head_dim: int) -> "Softmax":
    zeros = jnp.zeros((rows, queries), jnp.float32)
    return cls(zeros + MASKED, zeros, jnp.zeros((rows, queries, head_dim), jnp.float32))

  def add(self, scores: Float[Array, "R Q S"], values: Float[Array, "R S hd"]) -> "Softmax":
    """Masked scores count for nothing, also where no key was seen yet: adding them changes no bit."""
    top = jnp.maximum(self.top, scores.max(-1))
    weights = jnp.where(scores > MASKED / 2, jnp.exp(scores - top[..., None]), 0.0)
    old = jnp.exp(self.top - top)
    new = batched_matmul(weights.astype(values.dtype), values)
    return Softmax(top, self.total * old + weights.sum(-1), self.sum * old[..., None] + new)

  def finish(self) -> tuple[Float[Array, "R Q hd"], Float[Array, "R Q"]]:
    """The weighted mean, and log Σ exp(scores)."""
    total = jnp.maximum(self.total, 1e-30)
    return self.sum / total[..., None], self.top + jnp.log(total)


def batched_matmul(a: Float[Array, "R M K"], b: Float[Array, "R K N"]) -> Float[Array, "R M N"]:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


class _Blocks(NamedTuple):
  """Attention in blocks of queries by blocks of keys; only blocks that see each other are visited."""

  segment_ids: Int[Array, "R T"]
  first: Int[Array, "n"]  # block that holds the first key which queries of block i may see
  size: int

  def queries(self, x: Array, i: Array) -> Array:
    """[R, G, T, hd] → [R, G·size, hd]."""
    y = jax.lax.dynamic_slice_in_dim(x, i * self.size, self.size, 2)
    return y.reshape(y.shape[0], -1, y.shape[-1])

  def keys(self, x: Array, j: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, j * self.size, self.size, 1)

  def scores(self, q: Array, k: Array, i: Array, j: Array) -> Array:
    mine, theirs = self.keys(self.segment_ids, i), self.keys(self.segment_ids, j)
    order = jnp.arange(self.size)
    causal = (i * self.size + order)[:, None] >= (j * self.size + order)[None]
    mask = (mine[:, :, None] == theirs[:, None, :]) & causal[None]
    scores = batched_matmul(q, k.transpose(0, 2, 1)) * q.shape[-1] ** -0.5
    scores = scores.reshape(q.shape[0], -1, self.size, self.size)
    return jnp.where(mask[:, None], scores, MASKED).reshape(q.shape[0], -1, self.size)


def _plan_blocks(segment_ids: Int[Array, "R T"], size: int) -> _Blocks:
  index = jnp.arange(segment_ids.shape[1])[None]
  starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
  start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
  return _Blocks(segment_ids, start[:, ::size].min(0) // size, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(q, k, v, segment_ids, size):
  return _chunked_forward(q, k, v, segment_ids, size)[0]


def _chunked_forward(q, k, v, segment_ids, size):
  blocks = _plan_blocks(segment_ids, size)
  rows, groups, t, hd = q.shape

  def query(i):
    qi = blocks.queries(q, i)

    def key(j, state):
      return state.add(blocks.scores(qi, blocks.keys(k, j), i, j), blocks.keys(v, j))

    state = Softmax.start(rows, groups * size, hd)
    out, lse = jax.lax.fori_loop(blocks.first[i], i + 1, key, state).finish()
    return out.astype(q.dtype).reshape(rows, groups, size, hd), lse.reshape(rows, groups, size, 1)

  out, lse = (
    x.transpose(1, 2, 0, 3, 4).reshape(rows, groups, t, -1)
    for x in jax.lax.map(query, jnp.arange(t // size))
  )
  return out, (q, k, v, segment_ids, out, lse)


def _chunked_backward(size, residuals, g):
  """Recomputes the weights block by block from the saved log-sums (arXiv 2205.14135)."""
  q, k, v, segment_ids, out, lse = residuals
  blocks = _plan_blocks(segment_ids, size)
  scale = q.shape[-1] ** -0.5
  inner = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)

  def query(i, carry):
    gq, gk, gv = carry
    qi, gi, li, di = (blocks.queries(x, i) for x in (q, g, lse, inner))

    def key(j, carry):
      gqi, gk, gv = carry
      kj, vj = blocks.keys(k, j), blocks.keys(v, j)
      weights = jnp.exp(blocks.scores(qi, kj, i, j) - li)
      slope = weights * (batched_matmul(gi, vj.transpose(0, 2, 1)) - di) * scale
      slope, weights = slope.astype(q.dtype), weights.astype(q.dtype)
      gk = _add_block(gk, batched_matmul(slope.transpose(0, 2, 1), qi), j)
      gv = _add_block(gv, batched_matmul(weights.transpose(0, 2, 1), gi), j)
      return gqi + batched_matmul(slope, kj), gk, gv

    zeros = jnp.zeros(qi.shape, jnp.float32)
    gqi, gk, gv = jax.lax.fori_loop(blocks.first[i], i + 1, key, (zeros, gk, gv))
    gqi = gqi.reshape(*q.shape[:2], size, -1).astype(q.dtype)
    return jax.lax.dynamic_update_slice_in_dim(gq, gqi, i * size, 2), gk, gv

  zeros = (jnp.zeros_like(q), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
  gq, gk, gv = jax.lax.fori_loop(0, q.shape[2] // size, query, zeros)
  return gq, gk.astype(k.dtype), gv.astype(v.dtype), None


def _add_block(x: Array, y: Array, j: Array) -> Array:
  old = jax.lax.dynamic_slice_in_dim(x, j * y.shape[1], y.shape[1], 1)
  return jax.lax.dynamic_update_slice_in_dim(x, old + y, j * y.shape[1], 1)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def chunked_attention(
  q: Float[Array, "B T H hd"],
  k: Float[Array, "B T KV hd"],
  v: Float[Array, "B T KV hd"],
  segment_ids: Int[Array, "B T"],
  size: int,
) -> Float[Array, "B T H hd"]:
  """Causal attention inside each (contiguous) segment, in blocks of ``size``: memory linear in T.

  Blocks after the query, and blocks before the first segment that a block of queries touches, are
  not visited, so packed rows cost what their segments cost apart.
  """
  b, t, h, hd = q.shape
  kv = k.shape[2]
  pad = -t % size
  q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
  segment_ids = jnp.repeat(jnp.pad(segment_ids, ((0, 0), (0, pad))), kv, axis=0)
  q = q.reshape(b, t + pad, kv, h // kv, hd).transpose(0, 2, 3, 1, 4)
  q = q.reshape(b * kv, h // kv, t + pad, hd)
  k, v = (x.transpose(0, 2, 1, 3).reshape(b * kv, t + pad, hd) for x in (k, v))
  out = _chunked(q, k, v, segment_ids, size).reshape(b, h, t + pad, hd)
  return out.transpose(0, 2, 1, 3)[:, :t]


def self_attention(
  config: ModelConfig,
  q: Float[Array, "B T H hd"],
  k: Float[Array, "B T KV hd"],
  v: Float[Array, "B T KV hd"],
  segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T H hd"]:
  """Causal attention inside each segment.

  ``attention = "auto"`` takes the chunked form for rows longer than two chunks.  Raises ValueError
  for an unknown form.
  """
  t, form = q.shape[1], config.attention
  if form == "auto":
    form = "chunked" if t > 2 * config.attention_chunk else "dot"
  match form:
    case "dot":
      causal = jnp.tril(jnp.ones((t, t), bool))[None]
      return dot_attention(q, k, v, (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal)
    case "chunked":
      return chunked_attention(q, k, v, segment_ids, min(config.attention_chunk, t))
  raise ValueError(f"attention = {form!r}: choose one of auto, dot, chunked")
