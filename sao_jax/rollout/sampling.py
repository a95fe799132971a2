"""Sampling a token per row: two-level inverse CDF from one uniform number, top-k and top-p.

Gumbel noise over the vocabulary costs a random number per logit.  Here the vocabulary is read twice
(maximum, then sums of blocks of 128) and the draw looks inside one block only.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

BLOCK = 128


def token_uniform(keys: UInt32[Array, "B 2"], index: Int[Array, "B"]) -> Float[Array, "B"]:
  """One uniform number in [0, 1) per row, from the row's key folded with its token index.

  It depends on nothing else, so a request's tokens do not depend on its slot or neighbours.  All 24
  bits that float32 has in [½, 1) are used.
  """

  def one(key, index):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.bits(jax.random.fold_in(key, index), dtype=jnp.uint32)

  return (jax.vmap(one)(keys, index) >> 8).astype(jnp.float32) * 2.0**-24


def sample(
  logits: Float[Array, "B V"],
  uniform: Float[Array, "B"],
  temperature: Float[Array, "B"],
  top_k: Int[Array, "B"],
  top_p: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"], Float[Array, "B"]]:
  """Draws one token per row from softmax(logits / temperature), truncated by top-k, then top-p.

  Top-k keeps the k largest logits; top-p, on what is left and renormalised, the smallest set of the
  largest ones whose probability reaches p.  Whatever ties with the last one kept is kept.  Both
  cost passes over the vocabulary that are skipped unless a row asks for them.  A token of
  probability zero is never drawn.

  Args:
    logits: float32; -inf excludes a token.
    uniform: in [0, 1), one number per row (``token_uniform``).
    temperature: 0 takes the largest logit (the first one of equals).
    top_k: 0 switches it off.
    top_p: 1 switches it off.

  Returns:
    tokens (int32); logprobs, at the temperature and before truncation, the one that importance
    ratios use (greedy rows: at temperature 1); sampled_logprobs, after truncation (greedy rows: 0).
  """
  greedy = temperature <= 0
  temperature = jnp.where(greedy, 1.0, temperature)
  padding = -logits.shape[1] % BLOCK
  if padding:
    logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)

  sampled, best, log_total = _draw(logits, uniform, temperature)

  def truncated():
    kept = _truncate(logits, temperature, top_k, top_p)
    tokens, _, log_kept = _draw(kept, uniform, temperature)
    return tokens, log_kept

  wanted = ~greedy & ((top_k > 0) | (top_p < 1))
  sampled, log_kept = lax.cond(wanted.any(), truncated, lambda: (sampled, log_total))
  tokens = jnp.where(greedy, best, sampled)

  def at(tokens):
    return jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]

  scaled = (at(tokens) - at(best)) / temperature
  return tokens, scaled - log_total, jnp.where(greedy, 0.0, scaled - log_kept)


def _draw(
  logits: Float[Array, "B V"], uniform: Float[Array, "B"], temperature: Float[Array, "B"]
) -> tuple[Int[Array, "B"], Int[Array, "B"], Float[Array, "B"]]:
  """A token by inverse CDF, the most probable one, and log Σ exp((logits - max) / temperature).

  V is a multiple of BLOCK.  Nothing of the size of the logits is written: each pass over them ends
  in sums, and only the chosen block is looked at again.
  """
  blocks = logits.reshape(logits.shape[0], -1, BLOCK)
  block_top = blocks.max(-1)
  top = block_top.max(-1, keepdims=True)
  rate = 1.0 / temperature[:, None]
  sums = jnp.exp((blocks - top[..., None]) * rate[..., None]).sum(-1)
  cumulative = jnp.cumsum(sums, -1)
  total = cumulative[:, -1]
  target = uniform * total

  def inside(block):
    return jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]

  block = _first_above(cumulative, sums, target)
  before = jnp.take_along_axis(cumulative - sums, block[:, None], 1)[:, 0]
  weights = jnp.exp((inside(block) - top) * rate)
  token = _first_above(jnp.cumsum(weights, -1), weights, target - before)
  best_block = jnp.argmax(block_top == top, -1).astype(jnp.int32)
  best = jnp.argmax(inside(best_block) == top, -1).astype(jnp.int32)
  return block * BLOCK + token, best_block * BLOCK + best, jnp.log(total)


def _first_above(
  cumulative: Float[Array, "B n"], weights: Float[Array, "B n"], target: Float[Array, "B"]
) -> Int[Array, "B"]:
  """First entry of positive weight whose cumulative sum exceeds the target.

  A parallel cumulative sum need not be monotone in its last bits, and may end at or below the
  target: the weight is asked as well, and the largest entry is the answer when no entry is.
  """
  hit = (cumulative > target[:, None]) & (weights > 0)
  found = jnp.where(hit.any(-1), jnp.argmax(hit, -1), jnp.argmax(weights, -1))
  return found.astype(jnp.int32)


def _truncate(
  logits: Float[Array, "B V"],
  temperature: Float[Array, "B"],
  top_k: Int[Array, "B"],
  top_p: Float[Array, "B"],
) -> Float[Array, "B V"]:
  """-inf on what top-k, then top-p, leave out."""
  keys = _ordered(logits)
  lowest = jnp.iinfo(jnp.int32).min
  count = jnp.maximum(top_k, 1).astype(jnp.float32)
  bound = _largest_bound(keys, jnp.ones_like(logits), count)
  bound = jnp.where(top_k > 0, bound, lowest)
  weights = jnp.exp((logits - logits.max(-1, keepdims=True)) / temperature[:, None])
  weights = jnp.where(keys >= bound[:, None], weights, 0.0)
  nucleus = _largest_bound(keys, weights, top_p * weights.sum(-1))
  nucleus = jnp.minimum(nucleus, keys.max(-1))  # top_p = 0 keeps the largest
  bound = jnp.maximum(bound, jnp.where(top_p < 1, nucleus, lowest))
  return jnp.where(keys >= bound[:, None], logits, -jnp.inf)


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
  """Integers in the order of the floats."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _largest_bound(
  keys: Int[Array, "B V"], weights: Float[Array, "B V"], target: Float[Array, "B"]
) -> Int[Array, "B"]:
  """The largest bound with Σ weights[keys >= bound] >= target: bisection, 32 passes, no sort."""

  def halve(i, bound):
    step = jnp.where(i == 0, jnp.iinfo(jnp.int32).min, jnp.int32(1) << (31 - i))
    trial = bound ^ step  # sign bit first: from the lowest integer to 0
    mass = jnp.where(keys >= trial[:, None], weights, 0.0).sum(-1)
    return jnp.where(mass >= target, trial, bound)

  start = jnp.full(keys.shape[:1], jnp.iinfo(jnp.int32).min, jnp.int32)
  return lax.fori_loop(0, 32, halve, start)
