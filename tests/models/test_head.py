"""The chunked head against a full log-softmax, and that it holds no full logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import head

B, T, D, V = 3, 21, 16, 8000  # a 1 MiB budget makes chunks of 8 tokens: 63 tokens, 5 to 8 chunks


@pytest.fixture(scope="module")
def data():
  keys = jax.random.split(jax.random.key(0), 6)
  return {
    "hidden": jax.random.normal(keys[0], (B, T, D)),
    "head": 0.5 * jax.random.normal(keys[1], (D, V)),
    "targets": jax.random.randint(keys[2], (B, T), 0, V),
    "mask": jax.random.uniform(keys[3], (B, T)) < 0.6,
    "temperature": jax.random.uniform(keys[4], (B, T), minval=0.5, maxval=1.5),
    "cotangent": jax.random.normal(keys[5], (2, B, T)),
  }


def _oracle(data, hidden, w):
  z = jnp.einsum("btd,dv->btv", hidden, w) / data["temperature"][..., None]
  logp = jax.nn.log_softmax(z)
  picked = jnp.take_along_axis(logp, data["targets"][..., None], -1)[..., 0]
  entropy = -(jnp.exp(logp) * logp).sum(-1)
  return jnp.where(data["mask"], picked, 0), jnp.where(data["mask"], entropy, 0)


def _chunked(data, hidden, w, budget_mb=1):
  rest = (data["targets"], data["temperature"], data["mask"], budget_mb)
  return head.token_statistics(hidden, w, *rest)


def _close(a, b, atol=3e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), a, b)


def test_logprobs_and_entropy_equal_the_full_softmax_in_value_and_gradient(data):
  def loss(function):
    def f(hidden, w):
      logprobs, entropy = function(data, hidden, w)
      total = (logprobs * data["cotangent"][0] + entropy * data["cotangent"][1]).sum()
      return total, (logprobs, entropy)

    f = jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))
    return f(data["hidden"], data["head"])

  _close(loss(_chunked), loss(_oracle), atol=1e-4)


def _token_loss(logprobs, extras):
  ratio = jnp.exp(jnp.minimum(logprobs - extras["old"], 2.0))
  return -ratio * extras["advantage"], {"low": (logprobs < -9).astype(jnp.int8)}


def test_fused_loss_equals_autodiff_through_the_full_softmax(data):
  extras = {"old": jnp.full((B, T), -9.0), "advantage": data["cotangent"][0]}

  def full(hidden, w):
    logprobs, entropy = _oracle(data, hidden, w)
    loss, aux = _token_loss(logprobs, extras)
    aux = {k: jnp.where(data["mask"], v, 0) for k, v in aux.items()}
    total = jnp.where(data["mask"], loss, 0).sum()
    return 2 * total, {"logprobs": logprobs, "entropy": entropy, **aux}

  def fused(hidden, w):
    rest = (data["targets"], data["temperature"], data["mask"], extras, _token_loss, 1)
    total, outputs = head.token_loss(hidden, w, *rest)
    return 2 * total, outputs

  results = [
    jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(data["hidden"], data["head"])
    for f in (fused, full)
  ]
  _close(*results)
  assert results[0][0][1]["low"].dtype == jnp.int8
  _close(jax.jit(fused)(data["hidden"], data["head"]), results[1][0])  # without a gradient


def test_gradients_at_a_low_temperature_are_as_exact_as_the_values():
  """Small dyadic numbers make the logits exact, so that all error is the head's own."""
  rng = np.random.default_rng(0)
  n, t = 24, 1e-3
  hidden = rng.integers(-4, 5, (1, n, D)).astype(np.float32) / 4
  w = rng.integers(-16, 17, (D, V)).astype(np.float32) / 16384
  hidden[..., 0], w[0] = 1024.0, 1 / 128  # 8 that all logits share: 8,000 at this temperature
  c = rng.standard_normal((2, n)).astype(np.float32)
  targets = rng.integers(0, V, (1, n))

  temperature = np.float64(np.float32(t))
  z = hidden[0].astype(np.float64) @ w.astype(np.float64) / temperature
  logp = z - z.max(-1, keepdims=True)
  logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
  p, onehot = np.exp(logp), np.arange(V) == targets[0][:, None]
  entropy = -(p * logp).sum(-1, keepdims=True)

  def expected(c_logp, c_entropy):
    gz = c_logp[:, None] * (onehot - p) - c_entropy[:, None] * p * (logp + entropy)
    gz /= temperature
    return gz @ w.astype(np.float64).T, hidden[0].astype(np.float64).T @ gz

  rest = (jnp.asarray(targets), jnp.full((1, n), t, jnp.float32), jnp.ones((1, n), bool))

  def statistics(hidden, w):
    logprobs, entropies = head.token_statistics(hidden, w, *rest, 1)
    return (logprobs * c[:1] + entropies * c[1:]).sum()

  def fused(hidden, w):
    extras = {"weight": jnp.asarray(c[:1])}
    linear = lambda logprobs, extras: (logprobs * extras["weight"], {})  # noqa: E731
    return head.token_loss(hidden, w, *rest, extras, linear, 1)[0]

  for function, want in (
    (statistics, expected(c[0], c[1])),
    (fused, expected(c[0], 0 * c[1])),
  ):
    got = jax.jit(jax.grad(function, argnums=(0, 1)))(hidden, w)
    for g, e in zip(got, want, strict=True):
      assert np.abs(np.asarray(g).reshape(e.shape) - e).max() < 1e-5 * np.abs(e).max()


def test_nothing_under_the_mask_gets_out(data):
  bad = jnp.where(data["mask"][..., None], data["hidden"], jnp.nan)
  temperature = jnp.where(data["mask"], data["temperature"], 0.0)
  rest = (data["targets"], temperature, data["mask"], 1)

  def f(hidden, w):
    return sum(x.sum() for x in head.token_statistics(hidden, w, *rest))

  grads = jax.jit(jax.grad(f, argnums=(0, 1)))(bad, data["head"])
  assert all(bool(jnp.isfinite(g).all()) for g in grads)
  assert not np.asarray(grads[0])[~np.asarray(data["mask"])].any()


def test_no_masked_in_token_means_no_chunk_and_zero_gradient(data):
  chunks, size = head._plan(jnp.zeros((1, B * T), bool), V, 1)
  assert int(chunks.used) == 0
  assert size == 8
  long_prompt = jnp.zeros((1, 1000), bool).at[0, -9:].set(True)
  chunks, _ = head._plan(long_prompt, V, 1)
  assert int(chunks.used) == 2  # nine actions, however long the prompt
  zero = {**data, "mask": jnp.zeros((B, T), bool)}
  grads = jax.grad(lambda h, w: _chunked(zero, h, w)[0].sum(), argnums=(0, 1))(
    data["hidden"], data["head"]
  )
  assert not any(np.asarray(g).any() for g in grads)


def _compiled(tokens, budget_mb):
  shape = jax.ShapeDtypeStruct
  like = (shape((1, tokens), jnp.int32), shape((1, tokens), jnp.float32), shape((1, tokens), bool))

  def f(hidden, w, targets, temperature, mask):
    old = {"old": temperature, "advantage": temperature}
    fused = head.token_loss(hidden, w, targets, temperature, mask, old, _token_loss, budget_mb)[0]
    return fused + head.token_statistics(hidden, w, targets, temperature, mask, budget_mb)[0].sum()

  hidden, w = shape((1, tokens, D), jnp.float32), shape((D, V), jnp.float32)
  return jax.jit(jax.grad(f, argnums=(0, 1))).lower(hidden, w, *like).compile()


def test_no_full_logits_and_memory_flat_in_the_number_of_chunks():
  short, long = _compiled(512, 4), _compiled(2048, 4)
  for compiled, tokens in ((short, 512), (long, 2048)):
    shapes = re.findall(r"\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(n) for n in s.split(",")]) for s in shapes)
    assert largest < tokens * V / 4
  growth = long.memory_analysis().temp_size_in_bytes - short.memory_analysis().temp_size_in_bytes
  assert (
    growth < (2048 - 512) * (8 * D + 100) * 4
  )  # hidden-sized arrays only; logits would be 55 MB
