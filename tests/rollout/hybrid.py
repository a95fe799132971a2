"""The meaning of kv=keep, written without any cache code: each token's keys under its own weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sao_jax.models import layers, moe
from tests.rollout.serving import MAX_LEN, MODEL


@functools.cache
def _token_step():
  c = MODEL

  @jax.jit
  def step(params, token, position, past_keys, past_values):
    params = nnx.to_pure_dict(params)
    table = layers.rope_table(position[None], c.head_dim, c.rope_theta)
    x = params["embed"][token][None]
    for i in range(c.num_layers):
      p = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
      h = layers.rms_norm(x, p["attention_norm"], c.norm_eps)
      q, k, v = layers.attention_inputs(c, p["attention"], h, table)
      past_keys = past_keys.at[i, position].set(k[0])
      past_values = past_values.at[i, position].set(v[0])
      heads = c.num_heads // c.num_kv_heads
      keys = jnp.repeat(past_keys[i], heads, axis=1)
      values = jnp.repeat(past_values[i], heads, axis=1)
      scores = jnp.einsum("hd,shd->hs", q[0], keys) * c.head_dim**-0.5
      seen = (jnp.arange(MAX_LEN) <= position)[None]
      out = jnp.einsum("hs,shd->hd", jax.nn.softmax(jnp.where(seen, scores, -1e30), -1), values)
      x = x + layers.linear(out.reshape(1, -1), p["attention"]["wo"])
      h = layers.rms_norm(x, p["ffn_norm"], c.norm_eps)
      x = x + moe.feed_forward(c, p["ffn"], h, jnp.ones(1, bool), 8)[0]
    hidden = layers.rms_norm(x, params["final_norm"], c.norm_eps)
    return (hidden @ params["head"])[0], past_keys, past_values

  return step


def hybrid_logprobs(prompt, tokens, versions, prefill_version, temperature, params_of_version):
  """log-probs of ``tokens`` when token i was fed under the weights that sampled token i + 1, and the
  prompt but its last token under ``prefill_version``."""
  fed_under = [prefill_version] * (len(prompt) - 1) + list(versions)
  shape = (MODEL.num_layers, MAX_LEN, MODEL.num_kv_heads, MODEL.head_dim)
  keys, values = jnp.zeros(shape), jnp.zeros(shape)
  everything, result = [*prompt, *tokens], []
  for i, version in enumerate(fed_under):
    logits, keys, values = _token_step()(
      params_of_version(version), np.int32(everything[i]), np.int32(i), keys, values
    )
    if i >= len(prompt) - 1:
      result.append(float(jax.nn.log_softmax(logits / temperature)[everything[i + 1]]))
  return np.asarray(result)
