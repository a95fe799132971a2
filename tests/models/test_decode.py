"""Cached forward ≡ training forward; a row's bits depend on neither slot nor neighbours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sao_jax.config import ModelConfig
from sao_jax.models import decode, transformer

V, S, SLOTS = 64, 32, 8
MOE = ModelConfig(vocab_size=V, d_model=32, head_dim=8, d_ff=16, moe_block_train=8)
DENSE = ModelConfig(
  vocab_size=V,
  d_model=32,
  head_dim=8,
  d_ff=16,
  num_experts=0,
  qk_norm=False,
  qkv_bias=True,
  tie_embeddings=True,
)


@functools.cache
def _setup(name):
  config = {"moe": MOE, "dense": DENSE}[name]
  graphdef, params = transformer.init_params(config, 0)
  view = jax.jit(lambda p: decode.decode_view(p, config))(params)

  @jax.jit
  def full(tokens):
    model = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return transformer.hidden_states(model, tokens, positions, jnp.ones_like(tokens))[0]

  @functools.partial(jax.jit, donate_argnums=2)
  def extend(tokens, start, cache, valid):
    return decode.extend(config, view, tokens, start, cache, valid=valid)

  return config, view, full, extend


def _tokens(seed, *shape):
  return jax.random.randint(jax.random.key(seed), shape, 0, V)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_ragged_prefill_appended_chunk_and_decode_equal_the_full_forward(name):
  config, _, full, extend = _setup(name)
  tokens = _tokens(1, SLOTS, 24)
  want = full(tokens)
  lengths = jnp.array([8, 1, 3, 5, 8, 2, 7, 6])
  cache = decode.init_cache(config, SLOTS, S)

  def feed(width, start, count, cache):
    index = jnp.minimum(start[:, None] + jnp.arange(width)[None], 23)
    valid = jnp.arange(width)[None] < count[:, None]
    hidden, cache = extend(jnp.take_along_axis(tokens, index, 1), start, cache, valid)
    for b in range(SLOTS):
      n = int(count[b])
      span = slice(int(start[b]), int(start[b]) + n)
      np.testing.assert_allclose(hidden[b, :n], want[b, span], atol=1e-5)
    return start + count, cache

  at, cache = feed(8, jnp.zeros(SLOTS, jnp.int32), lengths, cache)  # prefill
  at, cache = feed(8, at, lengths[::-1], cache)  # an observation, appended
  for _ in range(2):  # decode, one idle row
    at, cache = feed(1, at, jnp.ones(SLOTS, jnp.int32).at[3].set(0), cache)


def test_long_rows_are_read_block_by_block_with_the_same_result():
  config = ModelConfig(vocab_size=V, num_layers=1, d_model=16, head_dim=8, num_experts=0, d_ff=8)
  graphdef, params = transformer.init_params(config, 0)
  view = decode.decode_view(params, config)
  tokens = _tokens(2, 1, 600)
  positions = jnp.arange(600)[None]
  model = nnx.merge(graphdef, params)
  want = transformer.hidden_states(model, tokens, positions, jnp.ones_like(tokens))[0]
  cache = decode.init_cache(config, 1, 610)  # no multiple of the block
  extend = jax.jit(functools.partial(decode.extend, config, view))
  got = []
  for start, width in ((0, 300), (300, 300)):
    chunk = jax.lax.dynamic_slice_in_dim(tokens, start, width, 1)
    hidden, cache = extend(chunk, jnp.array([start]), cache)
    got.append(hidden)
  np.testing.assert_allclose(jnp.concatenate(got, 1), want, atol=1e-5)


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_a_row_does_not_depend_on_slot_or_neighbours_bit_for_bit(name):
  config, view, _, extend = _setup(name)
  mine = _tokens(3, 1, 10)

  def run(slot, seed):
    """The row in ``slot``: prefilled alone, then decoded among other rows at other positions."""
    cache = decode.init_cache(config, SLOTS, S)
    noise = jax.random.normal(jax.random.key(seed), cache.keys[0].shape)
    cache = jax.tree.map(lambda x: x + noise.reshape(x.shape), cache)
    row = decode.init_cache(config, 1, S)
    first, row = decode.extend(config, view, mine[:, :8], jnp.zeros(1, jnp.int32), row)
    cache = decode.put_row(cache, row, slot)
    out = [first[0, -1]]
    for t in (8, 9):
      tokens = _tokens(seed + t, SLOTS, 1).at[slot].set(mine[0, t])
      start = jnp.full(SLOTS, seed % 7 + t).at[slot].set(t)
      valid = (jax.random.uniform(jax.random.key(seed), (SLOTS, 1)) < 0.7).at[slot].set(True)
      hidden, cache = extend(tokens, start, cache, valid)
      out.append(hidden[slot, 0])
      out.append(decode.logits(config, view, hidden)[slot, 0])
    kept = decode.take_row(cache, slot)
    return [np.asarray(x) for x in (*out, *(k[..., :10] for k in kept.keys))]

  base = run(0, 5)
  for slot, seed in ((0, 6), (3, 7), (7, 8), (5, 9)):
    for a, b in zip(run(slot, seed), base, strict=True):
      np.testing.assert_array_equal(a, b)


def test_invalid_tokens_and_columns_past_the_end_write_nothing():
  config, _, _, extend = _setup("moe")
  cache = jax.tree.map(lambda x: x + 7.0, decode.init_cache(config, SLOTS, S))
  start = jnp.full(SLOTS, 4).at[2].set(S)
  valid = (jnp.arange(SLOTS) != 5)[:, None]
  _, cache = extend(_tokens(4, SLOTS, 1), start, cache, valid)
  kv = config.num_kv_heads
  for keys, values in zip(cache.keys, cache.values, strict=True):
    changed = (np.asarray(keys) != 7).any(1).reshape(SLOTS, kv, S).any(1)
    assert (changed == (np.asarray(values) != 7).any(2).reshape(SLOTS, kv, S).any(1)).all()
    want = np.zeros((SLOTS, S), bool)
    want[[0, 1, 3, 4, 6, 7], 4] = True
    np.testing.assert_array_equal(changed, want)


def test_view_is_a_copy_and_survives_donation():
  config, _, _, _ = _setup("dense")
  _, params = transformer.init_params(config, 1)
  view = decode.decode_view(params, config)
  embed = np.asarray(view["embed"])
  jax.tree.map(lambda x: x.delete(), params)
  np.testing.assert_array_equal(view["embed"], embed)
  assert all(not x.is_deleted() for x in jax.tree.leaves(view))


def test_bfloat16_view_decodes_close_to_float32():
  config, _, full, _ = _setup("moe")
  half = ModelConfig(**{**vars(config), "compute_dtype": "bfloat16"})
  _, params = transformer.init_params(config, 0)
  view = decode.decode_view(params, half)
  assert view["embed"].dtype == jnp.bfloat16
  assert view["layers"][0]["ffn"]["router"].dtype == jnp.float32
  tokens = _tokens(1, SLOTS, 24)[:1, :8]
  cache = decode.init_cache(half, 1, S)
  hidden, _ = decode.extend(half, view, tokens, jnp.zeros(1, jnp.int32), cache)
  assert hidden.dtype == jnp.bfloat16
  assert decode.logits(half, view, hidden).dtype == jnp.float32
  error = np.asarray(hidden, np.float32) - np.asarray(full(_tokens(1, SLOTS, 24))[:1, :8])
  assert np.sqrt((error**2).mean()) < 0.05


def test_rows_and_slots_must_agree():
  config, view, _, _ = _setup("moe")
  cache = decode.init_cache(config, SLOTS, S)
  with pytest.raises(ValueError, match="3 rows of tokens for a cache of 8 slots"):
    decode.extend(config, view, _tokens(0, 3, 1), jnp.zeros(3, jnp.int32), cache)
