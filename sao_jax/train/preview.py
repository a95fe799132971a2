"""What a run will be, from shapes alone: for ``--dry-run`` and for the first lines of every run."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.config import Config, ModelConfig, OptimizerConfig
from sao_jax.loader import leaves
from sao_jax.models.folder import read_config
from sao_jax.models.presets import smollm2_135m
from sao_jax.optim import TRAIN, count_parameters, label_tree, learning_rate
from sao_jax.train.stage import refusals
from sao_jax.train.state import abstract

MIB = 2**20


def preview(config: Config) -> list[str]:
  """Parameters, first learning rates and memory, a line each.

  Raises ConfigError for patterns that match nothing or freeze nothing, before any long work.
  """
  model = known_model(config)
  if model is None:
    return [f"the architecture is read from {config.weights.path}"]
  lines = []
  for name, kind, trainable, used in (
    ("policy", "policy", (), True),
    ("critic", "critic", config.critic.trainable, config.critic.enabled),
    ("critic, pretraining", "critic", config.value_pretrain.trainable, config.critic.enabled),
  ):
    if used:
      params = abstract(model, kind)[1]
      live, frozen = count_parameters(params, label_tree(params, trainable))
      lines.append(f"{name}: {live:,} trained and {frozen:,} frozen parameters")
  return [*lines, *first_rates(config), *memory(config, model)]


def known_model(config: Config) -> ModelConfig | None:
  """The architecture, where it is known before weights are read."""
  if config.weights.source == "gguf":
    return None
  if config.weights.source == "huggingface" and config.weights.path:
    with refusals():
      return read_config(Path(config.weights.path).expanduser(), config.model)
  # Without a folder yet, the shapes are those that the config names: for --dry-run.
  if config.weights.source in ("random", "huggingface"):
    return config.model
  model = smollm2_135m()
  if experts := config.weights.upcycle_experts:
    model = dataclasses.replace(
      model, num_experts=experts, experts_per_token=experts, d_ff=model.d_ff // experts
    )
  return model


def first_rates(config: Config) -> list[str]:
  """The learning rate of each stage's first update: 0 here is a mistake that costs a run."""
  stages: list[tuple[str, OptimizerConfig, int]] = [("policy", config.policy, config.num_steps)]
  if config.critic.enabled:
    stages.append(("critic", config.critic, config.num_steps))
  if config.sft.steps or config.sft.epochs:  # of a file the last step is not known yet
    total = config.sft.steps or config.sft.warmup_steps + 1
    stages.insert(0, ("sft", config.sft, total))
  if config.value_pretrain.rollouts or config.value_pretrain.path:
    stages.append(("value_pretrain", config.value_pretrain, config.num_steps))
  return [
    f"{name} learning rate: {float(learning_rate(stage, total)(0)):.2e} at its first update, "
    f"{stage.lr:.2e} after {stage.warmup_steps} steps, {stage.schedule}"
    for name, stage, total in stages
  ]


def memory(config: Config, model: ModelConfig) -> list[str]:
  """An estimate of what RL holds at once, by part; the trainer's is divided over its mesh."""
  width = jnp.dtype(model.compute_dtype).itemsize
  devices = math.prod(dataclasses.asdict(config.mesh).values())
  parts: dict[str, float] = {}
  policy = abstract(model, "policy")[1]
  parts["policy and its Adam moments"] = 3 * _bytes(policy)
  if config.critic.enabled:
    critic = abstract(model, "critic")[1]
    labels = label_tree(critic, config.critic.trainable)
    live = sum(
      _size(x)
      for x, label in zip(jax.tree.leaves(critic), jax.tree.leaves(labels), strict=True)
      if label == TRAIN
    )
    parts["critic and its Adam moments"] = _bytes(critic) + 2 * live
  parts["gradients"] = _bytes(policy)
  rows = (config.packing.rows or config.batch_size) / config.policy.micro_batches
  tokens = rows * max(config.packing.lengths or (config.env.max_tokens,))
  more = ", more where a batch needs more" if config.packing.rows else ""
  parts[f"activations of a micro-batch ({rows:g} rows{more})"] = tokens * _activation_bytes(
    model, width
  )
  trainer = sum(parts.values()) / devices
  kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width
  engine = {
    "engine's weights": float(_bytes(policy)),
    "engine's keys and values": float(kv * config.rollout.slots * config.rollout.max_len),
    "kept prefixes and parked episodes": float(config.rollout.prefix_cache_mb * MIB),
  }
  lines = [f"memory, {name}: {size / MIB:,.1f} MiB" for name, size in {**parts, **engine}.items()]
  over = "" if devices == 1 else f" on each of {devices} devices"
  return [
    *lines,
    f"memory, estimated in all: {trainer / MIB:,.0f} MiB for the trainer{over}, "
    f"{sum(engine.values()) / MIB:,.0f} MiB for the engine",
  ]


def _activation_bytes(model: ModelConfig, width: int) -> float:
  """Per token, of what the backward pass keeps: residuals only under remat, else all of a layer."""
  heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  ffn = 3 * model.d_ff * (model.experts_per_token if model.num_experts else 1)
  inside = 4 * model.d_model + 2 * heads + ffn
  if model.remat == "full":
    return float(width * (model.num_layers * model.d_model + inside))
  return float(width * model.num_layers * (model.d_model + inside))


def _size(x: Any) -> int:
  return x.size * jnp.dtype(x.dtype).itemsize


def _bytes(tree: Any) -> int:
  return sum(_size(x) for x in jax.tree.leaves(tree))


def settings(config: Config) -> list[str]:
  """The settings that are not the defaults, a line per section."""
  default = dict(leaves(Config()))
  sections: dict[str, list[str]] = {}
  for path, value in leaves(config):
    if value != default[path]:
      section, _, name = path.rpartition(".")
      shown = repr(value) if not isinstance(value, float) else f"{value:g}"
      sections.setdefault(section or "run", []).append(f"{name}={shown}")
  return [f"{section}: {' '.join(pairs)}" for section, pairs in sections.items()]
