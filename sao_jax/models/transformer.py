"""One Transformer for Llama, Qwen2, Qwen3 and Qwen3-MoE, its critic, and what is computed of them.

Modules hold parameters, functions compute.  Call the functions inside jit after
``model = nnx.merge(graphdef, params)``.  Layers are stacked on a leading axis and applied by
``lax.scan``, so compile time is flat in depth.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models import layers, moe
from sao_jax.models.head import LossFn, token_loss, token_statistics


class StaticConfig(ModelConfig):
  """A ``ModelConfig`` that may be part of a jit key.  Not to be changed once made."""

  def __hash__(self) -> int:  # type: ignore[override]
    return hash(dataclasses.astuple(self))


def static_config(config: ModelConfig) -> StaticConfig:
  return StaticConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)})


def _matrix(config: ModelConfig, rngs: nnx.Rngs, *shape: int, scale: float = 1.0) -> nnx.Param:
  """Normal with standard deviation scale / √fan_in; fan_in is the last axis but one."""
  value = jax.random.normal(rngs.params(), shape, jnp.float32) * (scale * shape[-2] ** -0.5)
  return nnx.Param(value.astype(config.param_dtype))


def _vector(config: ModelConfig, *shape: int, fill: float = 1.0) -> nnx.Param:
  return nnx.Param(jnp.full(shape, fill, config.param_dtype))


class Attention(nnx.Module):
  """Projections of all layers, stacked on axis 0."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    n, d, hd = config.num_layers, config.d_model, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    self.wq = _matrix(config, rngs, n, d, q)
    self.wk = _matrix(config, rngs, n, d, kv)
    self.wv = _matrix(config, rngs, n, d, kv)
    self.wo = _matrix(config, rngs, n, q, d, scale=(2 * n) ** -0.5)
    if config.qk_norm:
      self.q_norm = _vector(config, n, hd)
      self.k_norm = _vector(config, n, hd)
    if config.qkv_bias:
      self.bq = _vector(config, n, q, fill=0.0)
      self.bk = _vector(config, n, kv, fill=0.0)
      self.bv = _vector(config, n, kv, fill=0.0)


class FeedForward(nnx.Module):
  """Dense SwiGLU or experts of all layers, stacked on axis 0."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    n, d, f = config.num_layers, config.d_model, config.d_ff
    stack = (n, config.num_experts) if config.num_experts else (n,)
    if config.num_experts:
      self.router = _matrix(config, rngs, n, d, config.num_experts)
    self.w_gate_up = _matrix(config, rngs, *stack, d, 2 * f)
    self.w_down = _matrix(config, rngs, *stack, f, d, scale=(2 * n) ** -0.5)


class Layers(nnx.Module):
  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.attention_norm = _vector(config, config.num_layers, config.d_model)
    self.attention = Attention(config, rngs)
    self.ffn_norm = _vector(config, config.num_layers, config.d_model)
    self.ffn = FeedForward(config, rngs)


class Backbone(nnx.Module):
  """Embedding, layers and final norm: what the policy and the critic have in common."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = static_config(config)
    embed = jax.random.normal(rngs.params(), (config.vocab_size, config.d_model), jnp.float32)
    self.embed = nnx.Param((embed * config.d_model**-0.5).astype(config.param_dtype))
    self.layers = Layers(config, rngs)
    self.final_norm = _vector(config, config.d_model)


class Transformer(Backbone):
  """The policy: a backbone and a vocabulary head (absent when tied to the embedding)."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    super().__init__(config, rngs)
    if not config.tie_embeddings:
      self.head = _matrix(config, rngs, config.d_model, config.vocab_size)


class ValueHead(nnx.Module):
  def __init__(self, config: ModelConfig):
    self.kernel = _vector(config, config.d_model, fill=0.0)
    self.bias = _vector(config, fill=0.0)


class ValueModel(Backbone):
  """The critic: a backbone and one linear value head, 0 at the start."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    super().__init__(config, rngs)
    self.value_head = ValueHead(config)


def init_params(config: ModelConfig, seed: int, kind: str = "policy") -> tuple[Any, nnx.State]:
  """(graphdef, params) of a fresh ``Transformer`` ("policy") or ``ValueModel`` ("critic")."""
  models = {"policy": Transformer, "critic": ValueModel}
  if kind not in models:
    raise ValueError(f"kind = {kind!r}: choose one of {', '.join(models)}")

  def make() -> nnx.Module:
    return models[kind](config, nnx.Rngs(seed))

  # One compilation instead of one per array and operation.
  return nnx.split(nnx.eval_shape(make))[0], jax.jit(lambda: nnx.state(make()))()


def value_model_from_policy(config: ModelConfig, policy_params: nnx.State) -> nnx.State:
  """Parameters of a ``ValueModel``: a copy of the policy's backbone, and a value head of zeros.

  No buffer is shared, so that either model's step may donate its own.
  """
  state = nnx.state(nnx.eval_shape(lambda: ValueModel(config, nnx.Rngs(0))))
  policy = nnx.to_pure_dict(policy_params)
  critic = {
    name: jax.tree.map(lambda x: jnp.array(x, copy=True), policy[name])
    if name in policy
    else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    for name, like in nnx.to_pure_dict(state).items()
  }
  nnx.replace_by_pure_dict(state, critic)
  return state


def _layer(config, p, x, table, segment_ids, live):
  b, t, d = x.shape
  h = layers.rms_norm(x, p["attention_norm"], config.norm_eps)
  q, k, v = layers.attention_inputs(config, p["attention"], h, table)
  o = layers.self_attention(config, q, k, v, segment_ids)
  x = x + layers.linear(o.reshape(b, t, -1), p["attention"]["wo"])
  h = layers.rms_norm(x, p["ffn_norm"], config.norm_eps).reshape(b * t, d)
  y, counts = moe.feed_forward(config, p["ffn"], h, live, config.moe_block_train)
  return x + y.reshape(b, t, d), counts


def _router_stats(counts: dict[str, Array]) -> dict[str, Array]:
  if not counts:
    zero = jnp.zeros((), jnp.float32)
    return {"aux_loss": zero, "largest_expert_share": zero, "dead_experts": zero}
  choices, probs = jax.lax.stop_gradient(counts["choices"]), counts["probs"]
  share = choices / jnp.maximum(choices.sum(-1, keepdims=True), 1.0)
  mass = probs / jnp.maximum(jax.lax.stop_gradient(probs).sum(-1, keepdims=True), 1e-9)
  return {
    "aux_loss": choices.shape[-1] * (share * mass).sum(-1).mean(),
    "largest_expert_share": share.max(),
    "dead_experts": (choices == 0).sum().astype(jnp.float32),
  }


def hidden_states(
  model: Backbone,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
  """Final-norm outputs; hidden[t] has seen tokens[<= t] of its own segment.

  ``segment_ids`` is 0 for padding.  The second value has the router's ``aux_loss`` (load balance,
  E · Σ share · probability, mean over layers; 1 when balanced; arXiv 2101.03961),
  ``largest_expert_share`` and ``dead_experts`` (both over all layers), 0 for a dense model.
  """
  config = model.config
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  table = layers.rope_table(positions, config.head_dim, config.rope_theta)
  live = (segment_ids > 0).reshape(-1)
  x = params["embed"].astype(config.compute_dtype)[tokens]

  def body(x, p):
    return _layer(config, p, x, table, segment_ids, live)

  if config.remat == "full":
    body = jax.checkpoint(body, prevent_cse=False)
  x, counts = jax.lax.scan(body, x, params["layers"])
  return layers.rms_norm(x, params["final_norm"], config.norm_eps), _router_stats(counts)


def shift_right(x: Array) -> Array:
  """x[:, t − 1] at t, zeros at t = 0: from "after token t" to "before token t" ("B T ...").

  The one place of the shift by one: logprobs[t] and values[t] belong to token t, made from hidden
  states of tokens[< t].
  """
  return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _head(model: Transformer) -> Array:
  return model.embed[...].T if model.config.tie_embeddings else model.head[...]


def token_logprobs(
  model: Transformer,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """log π(tokens[t] | tokens[< t]) and the entropy of that distribution, at ``temperature[t]``.

  0 off mask; the first token of a segment is never scored.  Logits are held for one chunk of
  tokens at a time (``config.head_chunk_mb``).  Differentiable.
  """
  hidden, _ = hidden_states(model, tokens, positions, segment_ids)
  mask = mask & (positions > 0)
  budget = model.config.head_chunk_mb
  return token_statistics(shift_right(hidden), _head(model), tokens, temperature, mask, budget)


def policy_token_loss(
  model: Transformer,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  temperature: Float[Array, "B T"],
  mask: Bool[Array, "B T"],
  extras: Any,
  loss_fn: LossFn,
) -> tuple[tuple[Float[Array, ""], dict[str, Array]], dict[str, Array]]:
  """((Σ over mask of the token loss, {"logprobs", "entropy", aux…} "B T"), router statistics).

  ``loss_fn(logprobs "n", extras "n") → (loss "n", aux dict of "n")`` is elementwise; ``extras`` is a
  pytree of "B T".  Loss and gradient are made together, chunk by chunk: the quickest way to train.
  Only the sum (and the router's aux_loss) has a gradient.
  """
  hidden, stats = hidden_states(model, tokens, positions, segment_ids)
  mask = mask & (positions > 0)
  budget, head = model.config.head_chunk_mb, _head(model)
  hidden = shift_right(hidden)
  return token_loss(hidden, head, tokens, temperature, mask, extras, loss_fn, budget), stats


def token_values(
  critic: ValueModel,
  tokens: Int[Array, "B T"],
  positions: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """values[t] = V(tokens[< t]) and next_values[t] = V(tokens[<= t]), float32.

  values is 0 at the first token of a segment: it has seen nothing.
  """
  hidden, _ = hidden_states(critic, tokens, positions, segment_ids)
  kernel = critic.value_head.kernel[...].astype(jnp.float32)
  bias = critic.value_head.bias[...].astype(jnp.float32)
  next_values = jnp.einsum("btd,d->bt", hidden.astype(jnp.float32), kernel) + bias
  return jnp.where(positions > 0, shift_right(next_values), 0.0), next_values
