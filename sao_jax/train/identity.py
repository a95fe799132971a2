"""What must be equal for a checkpoint to be gone on from: settings, by stage, and data."""

import hashlib
import json
from pathlib import Path
from typing import Any

from sao_jax.config import Config
from sao_jax.data.tasks import fingerprint
from sao_jax.loader import leaves
from sao_jax.models.pretrained import ARCHITECTURE_FIELDS

# Settings that change what is watched, kept or retried, not what is trained.
FREE = (
  *(
    "name",
    "run_dir",
    "tensorboard",
    "max_bad_steps",
    "num_steps",
    "critic.min_explained_variance",
  ),
  *("rollout.await_seconds", "rollout.attempts", "sandbox.concurrency"),
)
FREE_SECTIONS = ("evaluate", "checkpoint", "report", "mesh")
SFT_SECTIONS = ("seed", "model", "weights", "chat", "task", "env", "packing", "sft")
VALUE_SECTIONS = (*SFT_SECTIONS, "rollout", "sandbox", "advantage", "value_pretrain")


def sft_identity(config: Config, data: str) -> dict[str, Any]:
  """Of the supervised start; ``data`` is its fingerprint."""
  return plain(sft_settings(config) | {"data": data} | _tokenizer(config))


def value_identity(config: Config, data: str) -> dict[str, Any]:
  """Of value pretraining, which starts from the policy of the supervised start."""
  return plain(value_settings(config) | {"data": data} | _tokenizer(config))


def sft_settings(config: Config) -> dict[str, Any]:
  """What decides the supervised start, but for the contents of files."""
  return _settings(config, SFT_SECTIONS)


def value_settings(config: Config) -> dict[str, Any]:
  """The same of value pretraining."""
  return _settings(config, VALUE_SECTIONS) | {"critic.micro_batches": config.critic.micro_batches}


def policy_settings(config: Config) -> dict[str, Any]:
  """What a policy's weights mean: its architecture and its tokenizer, not how it is computed."""
  names = (
    *(f"model.{field}" for field in ARCHITECTURE_FIELDS),
    *("weights.source", "weights.upcycle_experts", "chat.format"),
  )
  return plain({p: x for p, x in leaves(config) if p in names} | _tokenizer(config))


def run_identity(config: Config) -> dict[str, Any]:
  """Of RL: everything that is not free.

  ``num_steps`` may grow, unless a schedule ends at it.
  """
  settings = {
    path: value
    for path, value in leaves(config)
    if path not in FREE and path.partition(".")[0] not in FREE_SECTIONS
  }
  if "cosine" in (config.policy.schedule, config.critic.schedule):
    settings["num_steps"] = config.num_steps
  return plain(settings | {"data": fingerprint(config.task)} | _tokenizer(config))


def _tokenizer(config: Config) -> dict[str, str]:
  """sha256 of the tokenizer's file: under another one the weights' ids would mean something else."""
  if not config.chat.tokenizer:
    return {}
  with Path(config.chat.tokenizer).expanduser().open("rb") as file:
    return {"tokenizer": hashlib.file_digest(file, "sha256").hexdigest()}


def _settings(config: Config, sections: tuple[str, ...]) -> dict[str, Any]:
  return {
    path: value
    for path, value in leaves(config)
    if path.partition(".")[0] in sections and path not in FREE
  }


def plain(identity: dict[str, Any]) -> dict[str, Any]:
  """As JSON gives it back, so that what was saved and what is now compare equal."""
  return json.loads(json.dumps(identity))
