"""Cached forward for the rollout engine: pure functions of a per-layer view of the parameters.

The view holds one dict per layer, so that a decode step reads weights in place; ``lax.scan`` over
stacked layers would copy every expert once a step.  Keys are kept [slots·KV, hd, S] and values
[slots·KV, S, hd]: both products of a decode step are then plain batched matmuls, nothing is
transposed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models import layers, moe


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values, one array per layer.  A slot's rows are slot·KV … slot·KV + KV − 1."""

  keys: tuple[Float[Array, "R hd S"], ...]
  values: tuple[Float[Array, "R S hd"], ...]
  kv_heads: int = dataclasses.field(metadata={"static": True})

  @property
  def slots(self) -> int:
    return self.keys[0].shape[0] // self.kv_heads

  @property
  def max_len(self) -> int:
    return self.keys[0].shape[-1]


MOST_SPLIT = 16  # experts up to which each is an array of its own; they are compiled one by one


def decode_view(params: nnx.State, config: ModelConfig) -> dict[str, Any]:
  """Per-layer copies of the policy's parameters in ``compute_dtype``; norms and router as they are.

  Copies, so that a training step may donate ``params``.
  """
  tree = nnx.to_pure_dict(params)

  def copy(path, x):
    name = path[-1].key
    keep = name == "router" or name.endswith("norm")
    return jnp.array(x, dtype=None if keep else config.compute_dtype, copy=True)

  tree = jax.tree_util.tree_map_with_path(copy, tree)
  stacked = tree.pop("layers")
  per_layer = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(config.num_layers)]
  if 0 < config.num_experts <= MOST_SPLIT and moe.moe_form(config) == "blocks":
    for layer in per_layer:
      split = {name: tuple(layer["ffn"][name]) for name in ("w_gate_up", "w_down")}
      layer["ffn"] = {**layer["ffn"], **split}
  return {**tree, "layers": per_layer}


def init_cache(config: ModelConfig, slots: int, max_len: int) -> KVCache:
  rows, n = slots * config.num_kv_heads, config.num_layers
  keys = tuple(jnp.zeros((rows, config.head_dim, max_len), config.compute_dtype) for _ in range(n))
  values = tuple(
    jnp.zeros((rows, max_len, config.head_dim), config.compute_dtype) for _ in range(n)
  )
  return KVCache(keys, values, config.num_kv_heads)


def take_row(cache: KVCache, slot: int | Int[Array, ""]) -> KVCache:
  """The cache of one slot, as a cache of one slot."""
  kv = cache.kv_heads
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot * kv, kv, 0), cache)


def put_row(cache: KVCache, row: KVCache, slot: int | Int[Array, ""]) -> KVCache:
  """``cache`` with one slot replaced by ``row``."""
  return jax.tree.map(
    lambda x, r: jax.lax.dynamic_update_slice_in_dim(x, r, slot * r.shape[0], 0), cache, row
  )


def _write(
  keys: Array, values: Array, k: Array, v: Array, where: Int[Array, "B T"]
) -> tuple[Array, Array]:
  """Puts k, v [B, T, KV, hd] at columns ``where`` of each row; columns outside are dropped."""
  b, t, kv, hd = k.shape
  columns = jnp.repeat(where, kv, axis=0)
  rows = jnp.arange(b * kv)[:, None]
  k, v = (z.transpose(0, 2, 1, 3).reshape(b * kv, t, hd) for z in (k, v))
  keys = keys.at[rows, :, columns].set(k.astype(keys.dtype), mode="drop")
  return keys, values.at[rows, columns].set(v.astype(values.dtype), mode="drop")


BLOCK = 256  # queries and keys of a block, where several tokens are fed to a long row
PREFILL_BLOCK = 32  # rows of one expert that are multiplied together, where several tokens are fed
LONG_ROW = 512  # columns from which on a row is read block by block, as far as it is filled


def _attend(q: Array, keys: Array, values: Array, mask: Bool[Array, "B T S"]) -> Array:
  """q [B, T, H, hd] on whole cache rows → [B, T, H·hd]."""
  b, t, h, hd = q.shape
  kv = keys.shape[0] // b
  g = h // kv
  q = q.reshape(b, t, kv, g, hd).transpose(0, 2, 1, 3, 4).reshape(b * kv, t * g, hd)
  scores = layers.batched_matmul(q, keys) * hd**-0.5
  scores = jnp.where(mask[:, None, :, None], scores.reshape(b, kv, t, g, -1), layers.MASKED)
  weights = jax.nn.softmax(scores, -1).astype(q.dtype).reshape(b * kv, t * g, -1)
  out = layers.batched_matmul(weights, values).astype(q.dtype)
  return out.reshape(b, kv, t, g, hd).transpose(0, 2, 1, 3, 4).reshape(b, t, h * hd)


def _attend_blocks(
  q: Array, k: Array, v: Array, keys: Array, values: Array, start: Array, valid: Array
) -> Array:
  """As ``_attend`` before the write: blocks of new tokens see the old row, then each other.

  Work grows with start·T + T²/2, whatever the length of the row.
  """
  b, t, h, hd = q.shape
  kv, size = k.shape[2], min(BLOCK, t)
  g, pad = h // kv, -t % size
  q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
  q = q.reshape(b, t + pad, kv, g, hd).transpose(0, 2, 1, 3, 4).reshape(b * kv, (t + pad) * g, hd)
  k, v = (x.transpose(0, 2, 1, 3).reshape(b * kv, t + pad, hd) for x in (k, v))
  valid = jnp.repeat(jnp.pad(valid, ((0, 0), (0, pad))), kv, axis=0)
  start = jnp.repeat(start, kv)[:, None, None]
  last = keys.shape[-1] - BLOCK  # a slice from further on would be moved back: masked by column
  scale = hd**-0.5

  def block(i):
    qi = jax.lax.dynamic_slice_in_dim(q, i * size * g, size * g, 1)
    order = jnp.arange(size)

    def old(j, state):
      at = jnp.minimum(j * BLOCK, last)
      column = (at + jnp.arange(BLOCK))[None, None]
      scores = layers.batched_matmul(qi, jax.lax.dynamic_slice_in_dim(keys, at, BLOCK, 2)) * scale
      mask = (column < start) & (column >= j * BLOCK)
      values_j = jax.lax.dynamic_slice_in_dim(values, at, BLOCK, 1)
      return state.add(jnp.where(mask, scores, layers.MASKED), values_j)

    def new(j, state):
      kj = jax.lax.dynamic_slice_in_dim(k, j * size, size, 1)
      scores = layers.batched_matmul(qi, kj.transpose(0, 2, 1)) * scale
      causal = (i * size + jnp.repeat(order, g))[:, None] >= (j * size + order)[None]
      mask = causal[None] & jax.lax.dynamic_slice_in_dim(valid, j * size, size, 1)[:, None]
      scores = jnp.where(mask, scores, layers.MASKED)
      return state.add(scores, jax.lax.dynamic_slice_in_dim(v, j * size, size, 1))

    state = layers.Softmax.start(b * kv, size * g, hd)
    state = jax.lax.fori_loop(0, -(-start.max() // BLOCK), old, state)
    return jax.lax.fori_loop(0, i + 1, new, state).finish()[0].astype(q.dtype)

  out = jax.lax.map(block, jnp.arange((t + pad) // size))
  out = out.reshape(-1, b, kv, size, g, hd).transpose(1, 0, 3, 2, 4, 5)
  return out.reshape(b, t + pad, h * hd)[:, :t]


def extend(
  config: ModelConfig,
  view: dict[str, Any],
  tokens: Int[Array, "B T"],
  start: Int[Array, "B"],
  cache: KVCache,
  *,
  valid: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache]:
  """Feeds tokens at positions start … start + T − 1 of each cache row.

  Writes their keys and values and returns final-norm hidden states; token t sees the cache before
  ``start`` and tokens ≤ t.  A token that is not ``valid``, or lies past the cache's end, writes
  nothing and its hidden state means nothing.  T = 1 is a decode step.
  """
  b, t = tokens.shape
  if b != cache.slots:
    raise ValueError(f"{b} rows of tokens for a cache of {cache.slots} slots: they must be equal")
  positions = start[:, None] + jnp.arange(t)[None]
  valid = jnp.ones((b, t), bool) if valid is None else valid
  where = jnp.where(valid, positions, cache.max_len)
  mask = jnp.arange(cache.max_len)[None, None] <= positions[..., None]
  table = layers.rope_table(positions, config.head_dim, config.rope_theta)
  # Blocks of one size: matmuls of other sizes round differently, so that a request's bits would
  # depend on its neighbours (``moe._block_sizes``).  Small ones, as there is no weight gradient.
  block = config.moe_block_decode if t == 1 else min(config.moe_block_train, PREFILL_BLOCK)
  blocked = t > 1 and cache.max_len >= LONG_ROW
  x = view["embed"][tokens]
  keys, values = list(cache.keys), list(cache.values)
  for i, p in enumerate(view["layers"]):
    h = layers.rms_norm(x, p["attention_norm"], config.norm_eps)
    q, k, v = layers.attention_inputs(config, p["attention"], h, table)
    if blocked:
      o = _attend_blocks(q, k, v, keys[i], values[i], start, valid)
    keys[i], values[i] = _write(keys[i], values[i], k, v, where)
    if not blocked:
      o = _attend(q, keys[i], values[i], mask)
    x = x + layers.linear(o, p["attention"]["wo"])
    h = layers.rms_norm(x, p["ffn_norm"], config.norm_eps).reshape(b * t, -1)
    y, _ = moe.feed_forward(config, p["ffn"], h, valid.reshape(-1), block)
    x = x + y.reshape(x.shape)
  hidden = layers.rms_norm(x, view["final_norm"], config.norm_eps)
  return hidden, KVCache(tuple(keys), tuple(values), cache.kv_heads)


def logits(
  config: ModelConfig, view: dict[str, Any], hidden: Float[Array, "... D"]
) -> Float[Array, "... V"]:
  """float32 logits, before temperature."""
  head = view["embed"] if config.tie_embeddings else view["head"]
  dims = (((hidden.ndim - 1,), (1 if config.tie_embeddings else 0,)), ((), ()))
  return jax.lax.dot_general(hidden, head, dims, preferred_element_type=jnp.float32)
