"""What is trained: policy and critic, each split once into a graph definition and parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from sao_jax.config import Config, ConfigError, ModelConfig, OptimizerConfig
from sao_jax.data.chat import Chat, make_chat
from sao_jax.models.pretrained import load_pretrained
from sao_jax.models.transformer import (
  Transformer,
  ValueModel,
  init_params,
  value_model_from_policy,
)
from sao_jax.optim import count_parameters, label_tree, make_optimizer
from sao_jax.sharding import param_shardings
from sao_jax.train.steps import Optimizer
from sao_jax.types import ModelState


@dataclasses.dataclass(frozen=True)
class Policy:
  """The policy before training: its configuration, graph, first parameters and its chat."""

  config: ModelConfig
  graphdef: nnx.GraphDef
  params: Any
  chat: Chat


def load_policy(config: Config) -> Policy:
  """Random or pretrained weights, with the chat that speaks to them.

  Raises ConfigError when the model has fewer embeddings than the tokenizer has ids.
  """
  if config.weights.source == "random":
    chat = make_chat(config.chat, None)
    model = config.model
    graphdef, params = init_params(model, config.seed, "policy")
  else:
    model, params, tokenizer = load_pretrained(config.weights, config.model)
    chat = make_chat(config.chat, tokenizer)
    graphdef = abstract(model, "policy")[0]
  if model.vocab_size < chat.vocab_size:
    raise ConfigError(
      f"model.vocab_size = {model.vocab_size} but the tokenizer of chat.format = "
      f"{config.chat.format!r} has {chat.vocab_size} ids; raise model.vocab_size"
    )
  return Policy(model, graphdef, params, chat)


def abstract(model: ModelConfig, kind: str) -> tuple[nnx.GraphDef, Any]:
  """Graph and shapes of a model, without making its parameters."""
  kinds = {"policy": Transformer, "critic": ValueModel}
  return nnx.split(nnx.eval_shape(lambda: kinds[kind](model, nnx.Rngs(0))))


def make_critic(policy: Policy) -> tuple[nnx.GraphDef, Any]:
  """A value model that starts from a copy of the policy's backbone; no buffer is shared."""
  graphdef = abstract(policy.config, "critic")[0]
  return graphdef, value_model_from_policy(policy.config, policy.params)


def make_state(
  params: Any,
  config: OptimizerConfig,
  total_steps: int,
  trainable: tuple[str, ...] = (),
  updates_per_step: int = 1,
  mesh: Mesh | None = None,
) -> tuple[ModelState, Optimizer]:
  """Fresh optimizer state for ``params``; moments exist for the trained leaves only.

  With a mesh, parameters and moments are split over it alike.
  """
  labels = label_tree(params, trainable)
  tx = make_optimizer(config, labels, total_steps, updates_per_step)

  def fresh(params: Any) -> ModelState:
    return ModelState(params, tx.init(params), jnp.int32(0))

  shardings = param_shardings(mesh, jax.eval_shape(fresh, params))
  if mesh is not None:
    params = jax.device_put(params, shardings.params)
  opt_state = jax.jit(tx.init, out_shardings=shardings and shardings.opt_state)(params)
  step = jax.device_put(jnp.int32(0), shardings and shardings.step)
  return ModelState(params, opt_state, step), Optimizer(tx, labels, shardings)


def describe(name: str, state: ModelState, optimizer: Optimizer) -> str:
  """One line: live and frozen parameters, bytes of the optimizer state."""
  live, frozen = count_parameters(state.params, optimizer.labels)
  size = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
  return (
    f"{name}: {live:,} trained and {frozen:,} frozen parameters, optimizer {size / 2**20:.1f} MiB"
  )
