"""The sampler's distribution by chi-square, its edges, and truncation against a plain sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sao_jax.rollout.sampling import sample, token_uniform

DRAWS = 40_000
draw = jax.jit(sample)


@jax.jit
def draw_many(logits, uniforms, temperature, top_k, top_p):
  def one(uniform):
    tokens, _, _ = sample(logits[None], uniform[None], temperature[None], top_k[None], top_p[None])
    return tokens[0]

  return jax.lax.map(one, uniforms, batch_size=2000)


def uniforms(count=DRAWS, seed=0):
  keys = jnp.tile(jax.random.key_data(jax.random.key(seed))[None], (count, 1))
  return jax.jit(token_uniform)(keys, jnp.arange(count))


def draws(logits, temperature=1.0, top_k=0, top_p=1.0, seed=0):
  scalars = jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p)
  return np.asarray(draw_many(jnp.asarray(logits, jnp.float32), uniforms(seed=seed), *scalars))


def softmax(x):
  e = np.exp(x - x.max())
  return e / e.sum()


def check_distribution(tokens, probabilities):
  """Chi-square over tokens, those expected less than 10 times pooled; never a zero one."""
  counts = np.bincount(tokens, minlength=len(probabilities))
  assert counts[probabilities == 0].sum() == 0
  expected = probabilities * len(tokens)
  rare = expected < 10
  pooled = np.append(counts[~rare], counts[rare].sum())
  pooled_expected = np.append(expected[~rare], expected[rare].sum())
  if pooled_expected[-1] < 10:
    keep = np.argsort(pooled_expected)[1:]
    pooled, pooled_expected = pooled[keep], pooled_expected[keep]
  scale = pooled.sum() / pooled_expected.sum()
  assert stats.chisquare(pooled, pooled_expected * scale).pvalue > 1e-4


def rows(kind, size):
  logits = np.random.default_rng(size).standard_normal(size).astype(np.float32)
  if kind == "peaked":
    logits[size // 2] += 8.0
  if kind == "flat":
    logits[:] = 0.0
  if kind == "holes":
    logits[np.random.default_rng(0).random(size) < 0.7] = -np.inf
    logits[0] = 1.0
  return logits


@pytest.mark.parametrize("size", [7, 128, 300])
@pytest.mark.parametrize("kind", ["noise", "peaked", "flat", "holes"])
def test_distribution(kind, size):
  logits = rows(kind, size)
  check_distribution(draws(logits), softmax(logits.astype(np.float64)))


def test_distribution_at_a_temperature():
  logits = rows("noise", 300)
  check_distribution(draws(logits, temperature=0.5), softmax(2 * logits.astype(np.float64)))


def reference_truncation(logits, top_k, top_p):
  """A plain sort: keep the k largest, renormalise, keep the smallest prefix that reaches p."""
  p = softmax(logits.astype(np.float64))
  order = np.argsort(-p, kind="stable")
  if top_k:
    p[order[top_k:]] = 0
  p = p / p.sum()
  if top_p < 1:
    size = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    p[order[size:]] = 0
  return p / p.sum()


TRUNCATIONS = [(5, 1.0), (0, 0.5), (20, 0.8), (1, 1.0), (0, 1e-6), (300, 0.99), (1000, 1.0)]


@pytest.mark.parametrize(("top_k", "top_p"), TRUNCATIONS)
def test_truncation_equals_a_sort(top_k, top_p):
  logits = rows("noise", 300)
  probabilities = reference_truncation(logits, top_k, top_p)
  tokens = draws(logits, top_k=top_k, top_p=top_p)
  kept = np.flatnonzero(probabilities)
  assert set(tokens) <= set(kept)
  if len(kept) > 1:
    check_distribution(tokens, probabilities)


def batch(logits, uniform, temperature=1.0, top_k=0, top_p=1.0):
  size = len(logits)
  return draw(
    jnp.asarray(logits),
    jnp.asarray(uniform, jnp.float32),
    jnp.broadcast_to(jnp.float32(temperature), size),
    jnp.broadcast_to(jnp.int32(top_k), size),
    jnp.broadcast_to(jnp.float32(top_p), size),
  )


def test_logprobs_of_mixed_rows():
  """Greedy, plain, hot and truncated rows in one batch; each reports its own two log-probs."""
  logits = np.tile(rows("noise", 300), (4, 1))
  uniform = np.full(4, 0.37)
  temperature, top_k, top_p = [0.0, 1.0, 1.5, 0.5], [0, 0, 0, 20], [1.0, 1.0, 1.0, 0.8]
  tokens, logprobs, sampled = batch(
    logits, uniform, jnp.array(temperature), jnp.array(top_k), jnp.array(top_p)
  )
  assert tokens.dtype == jnp.int32
  plain = np.log(softmax(logits[0].astype(np.float64)))
  assert tokens[0] == logits[0].argmax()
  np.testing.assert_allclose(logprobs[0], plain.max(), rtol=1e-5)
  assert sampled[0] == 0.0
  np.testing.assert_allclose(logprobs[1], plain[tokens[1]], rtol=1e-5)
  for row in (1, 2):
    np.testing.assert_allclose(sampled[row], logprobs[row], rtol=1e-5)
  for row in (2, 3):
    scaled = np.log(softmax(logits[row].astype(np.float64) / temperature[row]))
    np.testing.assert_allclose(logprobs[row], scaled[tokens[row]], rtol=1e-5)
  truncated = reference_truncation(logits[3] / 0.5, 20, 0.8)
  np.testing.assert_allclose(sampled[3], np.log(truncated[tokens[3]]), rtol=1e-4, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours():
  """A row is drawn alike alone, and beside a row that turns truncation on."""
  logits = np.stack([rows("noise", 300), rows("peaked", 300)])
  uniform = np.array([0.61, 0.2])
  both = batch(logits, uniform, top_k=jnp.array([0, 3]))
  plain = batch(logits, uniform)
  for a, b in zip(both, plain, strict=True):
    np.testing.assert_array_equal(a[0], b[0])


@pytest.mark.parametrize("size", [7, 128, 300, 1280])
def test_ends_of_the_unit_interval_never_draw_an_excluded_token(size):
  """u = 0 and the largest u below 1, with excluded tokens first and last and between."""
  logits = np.full((4, size), -np.inf, np.float32)
  logits[0, size // 2] = 3.0
  logits[1, [1, size - 2]] = [0.0, -1.0]
  logits[2] = rows("noise", size)
  logits[2, [0, -1]] = -np.inf
  logits[3] = -200.0  # underflows beside the one at 0
  logits[3, size // 3] = 0.0
  allowed = np.isfinite(logits) & (logits > -150)
  for u in (0.0, 2.0**-24, 0.5, 1 - 2.0**-24):
    for top_k, top_p in ((0, 1.0), (3, 0.9)):
      tokens, logprobs, sampled = batch(logits, np.full(4, u), top_k=top_k, top_p=top_p)
      assert allowed[np.arange(4), tokens].all()
      assert np.isfinite(logprobs).all()
      assert np.isfinite(sampled).all()


def test_greedy_takes_the_first_of_equals():
  logits = np.zeros((1, 300), np.float32)
  logits[0, [150, 299]] = 2.0
  tokens, _, _ = batch(logits, np.array([0.99]), temperature=0.0)
  assert tokens[0] == 150


def test_ties_with_the_last_kept_are_kept():
  logits = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
  assert set(draws(logits, top_k=2)) == {0, 1, 2}


def test_token_uniform_depends_on_key_and_index_only():
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 4))
  index = jnp.array([0, 5, 5, 9])
  got = token_uniform(keys, index)
  np.testing.assert_array_equal(got[2:], token_uniform(keys[2:], index[2:]))
  assert len(set(np.asarray(token_uniform(jnp.tile(keys[:1], (100, 1)), jnp.arange(100))))) == 100
  many = np.asarray(uniforms())
  assert many.min() >= 0
  assert many.max() < 1
  assert stats.kstest(many, "uniform").pvalue > 1e-4
