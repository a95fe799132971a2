"""A policy read from the folder that transformers writes: the counterpart of ``models.export``.

The folder holds config.json, tokenizer.json and the weights, as model.safetensors or as the parts
that model.safetensors.index.json lists.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from flax import nnx

from sao_jax.config import ModelConfig
from sao_jax.models import huggingface
from sao_jax.models.huggingface import CheckpointError
from sao_jax.models.safetensors import SafetensorsFile

# Options of config.json that the Transformer lacks, with what they may say; None is "not there".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "hidden_act": ("silu", None),
  "attention_bias": (False, None),
  "mlp_bias": (False, None),
  "use_sliding_window": (False, None),
  "decoder_sparse_step": (1, None),
  "mlp_only_layers": ([], None),
}
_PLAIN_ROPE = (None, "default")


def load_folder(
  folder: pathlib.Path, base: ModelConfig | None = None
) -> tuple[ModelConfig, nnx.State, tokenizers.Tokenizer]:
  """Architecture, parameters and tokenizer; what a checkpoint does not fix comes from ``base``.

  Raises CheckpointError for a missing or damaged file, an architecture or option (rope scaling,
  sliding windows, layers of another kind) that the Transformer does not have, and tensors that are
  not those of the architecture.
  """
  config = read_config(folder, base)
  try:
    parts = _Parts(folder, tied=config.tie_embeddings)
    params = huggingface.params_from_tensors(config, parts, huggingface.huggingface_table(config))
  except (OSError, KeyError, ValueError) as error:
    raise CheckpointError(f"{folder}: {error}") from error
  path = folder / "tokenizer.json"
  if not path.is_file():
    raise CheckpointError(f"{path}: no such file; save the tokenizer with the weights")
  try:
    return config, params, tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises no other
    raise CheckpointError(f"{path} is no tokenizer: {error}") from error


def read_config(folder: pathlib.Path, base: ModelConfig | None = None) -> ModelConfig:
  """The architecture alone; raises as ``load_folder`` does."""
  return model_config(_json(folder / "config.json"), base)


def model_config(document: Mapping[str, Any], base: ModelConfig | None = None) -> ModelConfig:
  """The ModelConfig that a config.json describes; raises as ``load_folder`` does."""
  kind = document.get("model_type")
  if kind not in ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
    raise CheckpointError(
      f"config.json: model_type = {kind!r}; known: llama, qwen2, qwen3, qwen3_moe, mixtral"
    )
  _refuse_options(document, kind)
  heads = document["num_attention_heads"]
  # transformers 5 writes Mixtral's name for Qwen3's too.
  experts = document.get("num_experts") or document.get("num_local_experts") or 0
  if kind in ("qwen3_moe", "mixtral") and not experts:
    raise CheckpointError(f"config.json of a {kind} model says not how many experts it has")
  width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
  try:
    return dataclasses.replace(
      base or ModelConfig(),
      vocab_size=document["vocab_size"],
      d_model=document["hidden_size"],
      num_layers=document["num_hidden_layers"],
      num_heads=heads,
      num_kv_heads=document.get("num_key_value_heads") or heads,
      head_dim=document.get("head_dim") or document["hidden_size"] // heads,
      d_ff=document[width],
      num_experts=experts if kind in ("qwen3_moe", "mixtral") else 0,
      experts_per_token=document.get("num_experts_per_tok", 0),
      qk_norm=kind in ("qwen3", "qwen3_moe"),
      qkv_bias=kind == "qwen2",
      tie_embeddings=document.get("tie_word_embeddings", False),
      rope_theta=_rope(document).get("rope_theta") or document.get("rope_theta", 10000.0),
      norm_eps=document["rms_norm_eps"],
    )
  except KeyError as error:
    raise CheckpointError(f"config.json of a {kind} model lacks {error}") from error


def _rope(document: Mapping[str, Any]) -> Mapping[str, Any]:
  """transformers 5 calls it rope_parameters and puts rope_theta there."""
  return document.get("rope_parameters") or document.get("rope_scaling") or {}


def _refuse_options(document: Mapping[str, Any], kind: str) -> None:
  neutral = dict(_NEUTRAL)
  if kind == "mixtral":
    neutral["sliding_window"] = (None,)
  if kind == "qwen3_moe":
    neutral["norm_topk_prob"] = (True,)  # left out it means False
  for name, allowed in neutral.items():
    if (value := document.get(name)) not in allowed:
      raise CheckpointError(
        f"config.json: {name} = {value!r}, but the Transformer only has {allowed[0]!r}; the model would "
        "compute something else than its checkpoint"
      )
  rope = _rope(document)
  if (scaling := rope.get("rope_type", rope.get("type"))) not in _PLAIN_ROPE:
    raise CheckpointError(
      f"config.json: rotary positions are scaled ({scaling!r}); the Transformer's are plain"
    )


class _Parts(Mapping[str, np.ndarray]):
  """The tensors of one file, or of all that an index lists, without those that nothing reads."""

  def __init__(self, folder: pathlib.Path, *, tied: bool) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
      names = sorted(set(_json(index)["weight_map"].values()))
    else:
      names = ["model.safetensors"]
    files = [SafetensorsFile(folder / name) for name in names]
    # A tied head is the embedding, whatever is stored; old files hold rotary frequencies.
    self._files = {
      tensor: file
      for file in files
      for tensor in file
      if not (tied and tensor == "lm_head.weight") and not tensor.endswith("rotary_emb.inv_freq")
    }

  def __getitem__(self, name: str) -> np.ndarray:
    return self._files[name][name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._files)

  def __len__(self) -> int:
    return len(self._files)

  def __contains__(self, name: object) -> bool:  # without reading
    return name in self._files


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    document = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise CheckpointError(f"{path}: {error.strerror}") from error
  except ValueError as error:
    raise CheckpointError(f"{path} is not JSON: {error}") from error
  if not isinstance(document, dict):
    raise CheckpointError(f"{path} is not a JSON object")
  return document
