"""A trained policy as a folder that transformers, vLLM and what builds on them can load."""

import json
import logging
import os
import pathlib
import tempfile
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import tokenizers
from flax import nnx

from sao_jax.config import ModelConfig
from sao_jax.models import huggingface, safetensors

log = logging.getLogger(__name__)

_CLASSES = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "mixtral": "MixtralForCausalLM",
}


@runtime_checkable
class Vocabulary(Protocol):
  """What an export needs of a chat (``data.chat.Chat``)."""

  tokenizer: tokenizers.Tokenizer
  pad_id: int
  eos_id: int
  stop_ids: tuple[int, ...]


def export_policy(
  folder: str | os.PathLike[str],
  config: ModelConfig,
  params: nnx.State,
  chat: Vocabulary,
  *,
  chat_template: str | None = None,
  max_positions: int = 32_768,
) -> pathlib.Path:
  """Writes weights, architecture and tokenizer; the folder is there whole or not at all.

  Args:
    folder: must not exist, or be empty.
    config: the policy's architecture, which decides the class (``huggingface.model_type``).
    params: the policy's parameters; they are written in their own dtype.
    chat: its tokenizer goes along, and the ids that end a reply.
    chat_template: see ``data.chat_template``; None writes none.
    max_positions: the longest sequence that loaders allow; rotary positions have no limit themselves.
  Returns:
    The folder.
  Raises:
    CheckpointError: no architecture computes what this model does, or the parameters are not its.
    FileExistsError: the folder holds something.
  """
  target = pathlib.Path(folder)
  if target.exists() and not (target.is_dir() and not any(target.iterdir())):
    raise FileExistsError(f"{target} is not an empty folder: choose another, or remove it first")
  _check_vocabulary(config, chat)
  tensors = huggingface.tensors_from_params(config, params, huggingface.huggingface_table(config))
  documents = {
    "config.json": architecture(config, chat, max_positions),
    "generation_config.json": {"eos_token_id": list(chat.stop_ids), "pad_token_id": chat.pad_id},
    **tokenizer_files(chat, chat_template, max_positions),
  }
  if documents["config.json"]["model_type"] == "qwen2" and not _is_bpe(documents):
    log.warning(
      "transformers 5 takes every tokenizer of a qwen2 model for Qwen2's own, and this one is not: "
      "load it with PreTrainedTokenizerFast.from_pretrained instead of AutoTokenizer"
    )
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
    whole = pathlib.Path(scratch) / "whole"
    whole.mkdir()
    for name, content in documents.items():
      text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
      (whole / name).write_text(text, encoding="utf-8")
    safetensors.write(whole / "model.safetensors", tensors)
    if target.exists():
      target.rmdir()  # empty, or this raises
    os.replace(whole, target)
  return target


def _is_bpe(documents: dict[str, dict[str, Any]]) -> bool:
  return documents["tokenizer.json"]["model"]["type"] == "BPE"


def _check_vocabulary(config: ModelConfig, chat: Vocabulary) -> None:
  if (size := chat.tokenizer.get_vocab_size()) > config.vocab_size:
    raise huggingface.CheckpointError(
      f"the tokenizer has {size} ids, but the model has model.vocab_size = {config.vocab_size} "
      "embeddings: this is not the tokenizer that it was trained with"
    )


def architecture(config: ModelConfig, chat: Vocabulary, max_positions: int) -> dict[str, Any]:
  """The contents of config.json.

  Names are those that transformers had before its version 5, which later versions read as well.
  """
  kind = huggingface.model_type(config)
  result = {
    "architectures": [_CLASSES[kind]],
    "model_type": kind,
    "vocab_size": config.vocab_size,
    "hidden_size": config.d_model,
    "intermediate_size": config.d_ff,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": max_positions,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": config.tie_embeddings,
    "torch_dtype": str(jnp.dtype(config.param_dtype)),
    "bos_token_id": None,
    "eos_token_id": chat.eos_id,
    "pad_token_id": chat.pad_id,
    "use_cache": True,
  }
  if kind == "llama":
    result |= {"mlp_bias": False}
  if config.num_experts:
    count = "num_local_experts" if kind == "mixtral" else "num_experts"
    result |= {count: config.num_experts, "num_experts_per_tok": config.experts_per_token}
  if kind == "qwen3_moe":
    result |= {
      "moe_intermediate_size": config.d_ff,
      "norm_topk_prob": True,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  return result


def tokenizer_files(
  chat: Vocabulary, chat_template: str | None, max_positions: int
) -> dict[str, dict[str, Any]]:
  """File name → contents.

  Only control tokens are named as ``eos_token`` or ``pad_token``: loaders make those special, and a
  newline, which may end a reply, must stay text.
  """
  special = {t.content for t in chat.tokenizer.get_added_tokens_decoder().values() if t.special}
  names = {"eos_token": chat.tokenizer.id_to_token(chat.eos_id)}
  names["pad_token"] = chat.tokenizer.id_to_token(chat.pad_id)
  names = {role: token for role, token in names.items() if token in special}
  config: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": max_positions,
    **names,
  }
  if chat_template is not None:
    config["chat_template"] = chat_template
  return {
    "tokenizer.json": json.loads(chat.tokenizer.to_str()),
    "tokenizer_config.json": config,
    "special_tokens_map.json": names,
  }
