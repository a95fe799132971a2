"""Schedules, AdamW, and freezing by path.

A frozen leaf has no optimizer moments, no weight decay, and no share in clipping or in the reported
norm: ``optax.partition`` with the clip *inside* the trained branch is the one spelling of five that
gives all of it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sao_jax.config import ConfigError, OptimizerConfig

TRAIN, FROZEN = "train", "frozen"


def learning_rate(
  config: OptimizerConfig, total_steps: int, updates_per_step: int = 1
) -> Callable[[Any], jax.Array]:
  """Learning rate as a function of the number of optimizer updates done.

  Schedules count loop steps, so K updates a step do not end them K times too early:
  step = ⌊updates / updates_per_step⌋.  Warm-up rises linearly over ``warmup_steps`` and starts
  above zero; ``cosine`` then falls to ``lr · final_fraction`` at the stage's last step, and is the
  only one that depends on ``total_steps``: the others let a run be extended.
  """
  warmup = config.warmup_steps
  if config.schedule == "cosine":
    warmup = min(warmup, max(total_steps - 1, 0))

  def rate(updates):
    step = jnp.asarray(updates) // updates_per_step
    rising = (step + 1) / (warmup + 1)
    if config.schedule == "cosine":
      progress = jnp.clip((step - warmup) / max(total_steps - 1 - warmup, 1), 0.0, 1.0)
      cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
      level = config.final_fraction + (1.0 - config.final_fraction) * cosine
    else:
      level = jnp.float32(1.0)
    return config.lr * jnp.where(step < warmup, rising, level)

  return rate


def path_name(path: Sequence[Any]) -> str:
  """``layers/ffn/w_down`` for a key path of a parameter tree."""
  return "/".join(str(key.key) for key in path if hasattr(key, "key"))


def label_tree(params: Any, trainable: Sequence[str]) -> Any:
  """Labels each leaf "train" or "frozen": trained are the leaves whose path matches a pattern.

  No pattern at all trains everything.  Raises ConfigError when a pattern matches nothing, or when
  the patterns together freeze nothing (leave them empty to say so on purpose).
  """
  if not trainable:
    return jax.tree.map(lambda _: TRAIN, params)
  names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
  for pattern in trainable:
    if not any(re.search(pattern, name) for name in names):
      raise ConfigError(
        f"trainable pattern {pattern!r} matches none of the {len(names)} parameters: "
        f"{', '.join(names)}"
      )
  frozen = [name for name in names if not any(re.search(p, name) for p in trainable)]
  if not frozen:
    raise ConfigError(
      f"trainable patterns {tuple(trainable)!r} match all {len(names)} parameters, so nothing is "
      "frozen. Name fewer, or set the patterns to () to train everything on purpose."
    )
  return jax.tree_util.tree_map_with_path(
    lambda path, _: FROZEN if path_name(path) in frozen else TRAIN, params
  )


def make_optimizer(
  config: OptimizerConfig, labels: Any, total_steps: int, updates_per_step: int = 1
) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW, on the leaves labelled "train"; nothing on the others."""
  trained = optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      learning_rate(config, total_steps, updates_per_step),
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
    ),
  )
  if FROZEN not in jax.tree.leaves(labels):
    return trained
  return optax.partition({TRAIN: trained, FROZEN: optax.set_to_zero()}, labels)


def stop_frozen(params: Any, labels: Any) -> Any:
  """Parameters with ``stop_gradient`` on the frozen leaves: their gradients cost nothing."""
  return jax.tree.map(
    lambda x, label: jax.lax.stop_gradient(x) if label == FROZEN else x, params, labels
  )


def trained_norm(grads: Any, labels: Any) -> jax.Array:
  """Global norm over the trained leaves only: what the clip sees, and what is reported."""
  pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(labels), strict=True)
  return optax.tree.norm([g for g, label in pairs if label == TRAIN])


def count_parameters(params: Any, labels: Any) -> tuple[int, int]:
  """(live, frozen) numbers of scalars."""
  pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(labels), strict=True))
  return tuple(  # type: ignore[return-value]
    sum(x.size for x, label in pairs if label == wanted) for wanted in (TRAIN, FROZEN)
  )
