"""Attention forms against each other, rotary positions, norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import ModelConfig
from sao_jax.models import layers

B, T, H, KV, HD = 2, 37, 4, 2, 8


def _inputs():
  keys = jax.random.split(jax.random.key(0), 4)
  q = jax.random.normal(keys[0], (B, T, H, HD))
  k, v = (jax.random.normal(key, (B, T, KV, HD)) for key in keys[1:3])
  segments = np.zeros((B, T), np.int32)
  segments[0, :20], segments[0, 20:33] = 1, 2  # packed, then padding
  segments[1] = 3
  return q, k, v, jnp.asarray(segments), jax.random.normal(keys[3], q.shape)


def test_chunked_attention_equals_dot_in_value_and_gradient():
  q, k, v, segments, cotangent = _inputs()
  results = []
  for form in ("dot", "chunked"):
    config = ModelConfig(attention=form, attention_chunk=8)

    def loss(q, k, v, config=config):
      out = layers.self_attention(config, q, k, v, segments)
      return (out * cotangent).sum(), out

    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    results.append(f(q, k, v))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


def test_chunked_attention_memory_is_linear():
  def temporary(t):
    shape = jax.ShapeDtypeStruct
    q, k = shape((1, t, H, HD), jnp.float32), shape((1, t, KV, HD), jnp.float32)
    config = ModelConfig(attention_chunk=64)
    f = jax.grad(lambda q, k, v, s: layers.self_attention(config, q, k, v, s).sum())
    compiled = jax.jit(f).lower(q, k, k, shape((1, t), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(4096) < 3 * temporary(2048)  # a square form would take four times as much


def test_attention_equals_a_loop_over_heads():
  q, k, v, segments, _ = _inputs()
  out = np.asarray(layers.self_attention(ModelConfig(), q, k, v, segments))
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  for b, t, h in ((0, 25, 3), (1, 11, 0)):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    scores = k[b, seen, h // 2] @ q[b, t, h] / np.sqrt(HD)
    weights = np.exp(scores - scores.max())
    want = weights @ v[b, seen, h // 2] / weights.sum()
    np.testing.assert_allclose(out[b, t, h], want, rtol=1e-4, atol=1e-5)


def test_rotated_products_depend_on_distance_only():
  x, y = jax.random.normal(jax.random.key(1), (2, 1, HD))
  tables = {p: layers.rope_table(jnp.array(p), HD, 100.0) for p in (0, 3, 7, 10)}
  product = lambda a, b: float((layers.rotate(x, tables[a]) * layers.rotate(y, tables[b])).sum())  # noqa: E731
  np.testing.assert_allclose(product(3, 0), product(10, 7), rtol=1e-5)
  np.testing.assert_allclose(layers.rotate(x, tables[0]), x, rtol=1e-6)


def test_rms_norm_in_bfloat16_is_computed_in_float32():
  x = jnp.array([[3.0, 4.0]], jnp.bfloat16)
  out = layers.rms_norm(x, jnp.array([1.0, 2.0]), 0.0)
  assert out.dtype == jnp.bfloat16
  want = np.array([[3.0, 8.0]]) / np.sqrt(12.5)
  np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=4e-3)


def test_an_unknown_form_is_refused():
  q, k, v, segments, _ = _inputs()
  with pytest.raises(ValueError, match="attention = 'flash'"):
    layers.self_attention(ModelConfig(attention="flash"), q, k, v, segments)
