"""GGUF checkpoints: metadata → ModelConfig, tensors → float32 arrays, vocabulary → tokenizer.

GGUF is the file format of llama.cpp: key-value metadata, then tensors, mostly quantised in blocks.
The PyPI package ``gguf`` parses the file and undoes the quantisation; what the numbers mean for our
models is decided here.  What this module does not understand it refuses by name: a model that loads
with a rope scaling left out still talks, only worse.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import tokenizers
from jaxtyping import Float32
from tokenizers import decoders, models, normalizers, pre_tokenizers

from sao_jax.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

# The digits-apart split of Qwen2's tokenizer.json, a public constant of that vocabulary.
_QWEN2_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


class GGUFFile(Mapping[str, np.ndarray]):
  """A GGUF file as a mapping tensor name → float32 array, dequantised at each access.

  Shapes are in row-major order, as the checkpoint's author saw them: a projection is [out, in].
  ``metadata`` holds the key-value pairs as Python values.
  """

  def __init__(self, path: str | pathlib.Path) -> None:
    self.path = pathlib.Path(path)
    reader = gguf.GGUFReader(self.path)
    self.metadata: dict[str, Any] = {key: f.contents() for key, f in reader.fields.items()}
    self._tensors = {tensor.name: tensor for tensor in reader.tensors}

  def __getitem__(self, name: str) -> Float32[np.ndarray, "..."]:
    tensor = self._tensors[name]
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return array.astype(np.float32, copy=False).reshape([int(n) for n in reversed(tensor.shape)])

  def __iter__(self) -> Iterator[str]:
    return iter(self._tensors)

  def __len__(self) -> int:
    return len(self._tensors)

  def __contains__(self, name: object) -> bool:  # without dequantising
    return name in self._tensors

  @property
  def architecture(self) -> str:
    return str(self.metadata["general.architecture"])


def model_config(file: GGUFFile, base: ModelConfig | None = None) -> ModelConfig:
  """The file's architecture; fields that a checkpoint does not fix come from ``base``.

  ``output.weight``, where the file stores it, becomes a head of its own, also if it began as a copy
  of the embedding: those are the numbers that the file computes with.  Without it the embedding is
  tied.

  Raises ValueError for an architecture or an option (rope scaling, partial rotary, sliding window,
  softcapping) that the Transformer does not have.
  """
  arch = file.architecture
  if arch not in ARCHITECTURES:
    raise ValueError(
      f"{file.path.name}: architecture {arch!r} is not supported; known: {', '.join(ARCHITECTURES)}"
    )

  def get(key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"{arch}.{key}", default)
    if value is None:
      raise ValueError(f"{file.path.name}: metadata lacks {arch}.{key}")
    return value

  heads = int(get("attention.head_count"))
  head_dim = int(get("attention.key_length", int(get("embedding_length")) // heads))
  _refuse_options(file, head_dim)
  experts = int(get("expert_count", 0))
  width = get("expert_feed_forward_length") if experts else get("feed_forward_length")
  return dataclasses.replace(
    base or ModelConfig(),
    vocab_size=len(file.metadata["tokenizer.ggml.tokens"]),
    d_model=int(get("embedding_length")),
    num_layers=int(get("block_count")),
    num_heads=heads,
    num_kv_heads=int(get("attention.head_count_kv", heads)),
    head_dim=head_dim,
    d_ff=int(width),
    num_experts=experts,
    experts_per_token=int(get("expert_used_count", 0)),
    qk_norm="blk.0.attn_q_norm.weight" in file,
    qkv_bias="blk.0.attn_q.bias" in file,
    tie_embeddings="output.weight" not in file,
    rope_theta=_shortest(get("rope.freq_base", 10000.0)),
    norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
  )


def _shortest(value: float) -> float:
  """The number that its author wrote: 1e-5, not the float32 9.999999747378752e-06."""
  return float(str(np.float32(value)))


def _refuse_options(file: GGUFFile, head_dim: int) -> None:
  arch = file.architecture
  neutral = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "rope.dimension_count": (head_dim,),
    "attention.value_length": (head_dim,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "attention.scale": (0.0, head_dim**-0.5),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
  }
  for key, allowed in neutral.items():
    value = file.metadata.get(f"{arch}.{key}", allowed[0])
    if value not in allowed:
      raise ValueError(
        f"{file.path.name}: {arch}.{key} = {value!r}, but the Transformer only has {allowed[0]!r}; "
        "the model would compute something else than its checkpoint"
      )


def tokenizer(file: GGUFFile) -> tokenizers.Tokenizer:
  """The byte-level BPE stored in the file, as a ``tokenizers.Tokenizer``.

  Control tokens become special tokens: text that spells one encodes to its one id.

  Raises ValueError for another tokenizer model than gpt2's or an unknown pre-tokenizer.
  """
  meta = file.metadata
  kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
  if kind != "gpt2":
    raise ValueError(
      f"{file.path.name}: tokenizer model {kind!r} is not supported, only 'gpt2' (byte-level BPE)"
    )
  tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
  vocab = {token: index for index, token in enumerate(tokens)}
  if len(vocab) != len(tokens):
    raise ValueError(
      f"{file.path.name}: {len(tokens)} tokens, but only {len(vocab)} different ones"
    )
  merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
  result = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
  match pre:
    case "smollm":
      result.pre_tokenizer = pre_tokenizers.Sequence(
        [
          pre_tokenizers.Digits(individual_digits=True),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
      )
    case "qwen2":
      result.normalizer = normalizers.NFC()
      result.pre_tokenizer = pre_tokenizers.Sequence(
        [
          pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), behavior="isolated"),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
      )
    case _:
      raise ValueError(f"{file.path.name}: pre-tokenizer {pre!r} is not one of smollm, qwen2")
  result.decoder = decoders.ByteLevel()
  for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
    result.add_tokens(
      [
        tokenizers.AddedToken(token, special=special, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ == wanted
      ]
    )
  return result
