"""Foreign checkpoints ↔ our parameter tree, by one table of names per format.

An Entry says which tensors of the checkpoint make one of our parameters.  Everything else (shapes,
stacking of layers and experts, what is missing or left over) follows from the table and the model's
own parameter tree, so that a new format is a new table.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Shaped

from sao_jax.config import ModelConfig
from sao_jax.models import gguf
from sao_jax.models.transformer import Transformer


class CheckpointError(ValueError):
  """A checkpoint and a model that do not fit each other; the message names the tensors."""


@dataclasses.dataclass(frozen=True)
class Entry:
  """One parameter of ours and the tensors of the checkpoint that it is made of.

  ``sources`` are joined along the last axis of ours.  A name may contain ``{layer}`` and
  ``{expert}``: those tensors are stacked along our leading axes, layers first.  ``transpose`` swaps
  the last two axes: checkpoints keep projections as [out, in], we keep [in, out].
  ``rotary_heads > 0`` undoes the row order of llama.cpp, see ``rotary_halves``.
  """

  path: str
  sources: tuple[str, ...]
  transpose: bool = False
  rotary_heads: int = 0


def rotary_halves(rows: Float32[np.ndarray, "R ..."], heads: int) -> Float32[np.ndarray, "R ..."]:
  """Row order of a q or k projection: llama.cpp's pairs (x0, y0, x1, y1, …) → halves (x…, y…).

  Rotary embedding turns the pairs (x_i, y_i).  llama.cpp keeps the two of a pair side by side for
  the architecture ``llama``; we, like transformers, keep all x_i of a head before all y_i.
  """
  pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


def rotary_pairs(rows: Shaped[np.ndarray, "R ..."], heads: int) -> Shaped[np.ndarray, "R ..."]:
  """The inverse of ``rotary_halves``."""
  halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
  return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_table(config: ModelConfig, architecture: str) -> tuple[Entry, ...]:
  """Names of GGUF's tensors for a model of ours (https://github.com/ggml-org/ggml, gguf.md)."""
  block = "blk.{layer}."
  paired = architecture == "llama"
  q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if paired else (0, 0)
  entries = [
    Entry("embed", ("token_embd.weight",)),
    Entry("final_norm", ("output_norm.weight",)),
    Entry("layers/attention_norm", (block + "attn_norm.weight",)),
    Entry("layers/ffn_norm", (block + "ffn_norm.weight",)),
    Entry("layers/attention/wq", (block + "attn_q.weight",), True, q_heads),
    Entry("layers/attention/wk", (block + "attn_k.weight",), True, kv_heads),
    Entry("layers/attention/wv", (block + "attn_v.weight",), True),
    Entry("layers/attention/wo", (block + "attn_output.weight",), True),
  ]
  if not config.tie_embeddings:
    entries.append(Entry("head", ("output.weight",), True))
  if config.qk_norm:
    entries.append(Entry("layers/attention/q_norm", (block + "attn_q_norm.weight",)))
    entries.append(Entry("layers/attention/k_norm", (block + "attn_k_norm.weight",)))
  if config.qkv_bias:
    entries.append(Entry("layers/attention/bq", (block + "attn_q.bias",), False, q_heads))
    entries.append(Entry("layers/attention/bk", (block + "attn_k.bias",), False, kv_heads))
    entries.append(Entry("layers/attention/bv", (block + "attn_v.bias",)))
  stem = block + "ffn_{part}" + ("_exps" if config.num_experts else "") + ".weight"
  gate, up, down = (stem.replace("{part}", part) for part in ("gate", "up", "down"))
  entries.append(Entry("layers/ffn/w_gate_up", (gate, up), True))
  entries.append(Entry("layers/ffn/w_down", (down,), True))
  if config.num_experts:
    entries.append(Entry("layers/ffn/router", (block + "ffn_gate_inp.weight",), True))
  return tuple(entries)


def model_type(config: ModelConfig) -> str:
  """The architecture of transformers that computes what the model computes.

  ===================  =======  =========  ============
  ..                   plain    q/k norm   q, k, v bias
  ===================  =======  =========  ============
  dense                llama    qwen3      qwen2
  mixture of experts   mixtral  qwen3_moe  –
  ===================  =======  =========  ============

  Mixtral's experts are ours: softmax → top-k → renormalise over SwiGLUs; so a Llama that was split
  into experts (``models.upcycle``) is a Mixtral whose tokens choose all of them.

  Raises CheckpointError, with the option to change, for what none of them can express.
  """
  if config.qkv_bias and config.qk_norm:
    raise CheckpointError(
      "no architecture has biases on q, k, v alone beside a q/k norm (Qwen3's attention_bias puts one "
      "on the output too): model.qkv_bias and model.qk_norm must not both be True"
    )
  if config.qkv_bias and config.num_experts:
    raise CheckpointError(
      f"no architecture has model.qkv_bias = True with model.num_experts = {config.num_experts} and "
      "nothing else (Qwen2-MoE adds a shared expert): train with model.qkv_bias = False"
    )
  if config.num_experts:
    return "qwen3_moe" if config.qk_norm else "mixtral"
  return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def huggingface_table(config: ModelConfig) -> tuple[Entry, ...]:
  """Names of transformers' tensors for a model of ours; raises as ``model_type`` does."""
  kind, block = model_type(config), "model.layers.{layer}."
  attention = block + "self_attn."
  entries = [
    Entry("embed", ("model.embed_tokens.weight",)),
    Entry("final_norm", ("model.norm.weight",)),
    Entry("layers/attention_norm", (block + "input_layernorm.weight",)),
    Entry("layers/ffn_norm", (block + "post_attention_layernorm.weight",)),
  ]
  for name in "qkvo":
    entries.append(Entry(f"layers/attention/w{name}", (f"{attention}{name}_proj.weight",), True))
  if not config.tie_embeddings:
    entries.append(Entry("head", ("lm_head.weight",), True))
  if config.qk_norm:
    for name in ("q_norm", "k_norm"):
      entries.append(Entry(f"layers/attention/{name}", (f"{attention}{name}.weight",)))
  if config.qkv_bias:
    for name in "qkv":
      entries.append(Entry(f"layers/attention/b{name}", (f"{attention}{name}_proj.bias",)))
  ffn, parts = block + "mlp.", ("gate_proj", "up_proj", "down_proj")
  if kind == "mixtral":
    ffn, parts = block + "block_sparse_moe.", ("w1", "w3", "w2")
  if config.num_experts:
    entries.append(Entry("layers/ffn/router", (ffn + "gate.weight",), True))
    ffn += "experts.{expert}."
  gate, up, down = (f"{ffn}{part}.weight" for part in parts)
  entries.append(Entry("layers/ffn/w_gate_up", (gate, up), True))
  entries.append(Entry("layers/ffn/w_down", (down,), True))
  return tuple(entries)


def params_from_tensors(
  config: ModelConfig, tensors: Mapping[str, np.ndarray], table: Sequence[Entry]
) -> nnx.State:
  """Parameters of a Transformer, read from a checkpoint.

  Each tensor is read once and one parameter is assembled at a time, so that the peak is the model
  plus its largest parameter.

  Raises CheckpointError naming tensors that are unknown, missing, used twice or of the wrong shape,
  and parameters of the model that the table does not cover.
  """
  abstract = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  leaves = dict(nnx.to_flat_state(nnx.state(abstract, nnx.Param)))
  by_path = {"/".join(str(part) for part in path): path for path in leaves}
  _check_names(config, by_path, tensors, table)
  dtype = jnp.dtype(config.param_dtype)
  filled = {}
  for entry in table:
    path = by_path[entry.path]
    array = _assemble(entry, leaves[path].shape, tensors, config)
    filled[path] = leaves[path].replace(jnp.array(array, dtype))  # a copy: JAX owns its buffers
  return nnx.from_flat_state(filled)


def _names(entry: Entry, config: ModelConfig) -> Iterator[str]:
  for source in entry.sources:
    for layer in range(config.num_layers) if "{layer}" in source else (0,):
      for expert in range(config.num_experts) if "{expert}" in source else (0,):
        yield source.format(layer=layer, expert=expert)


def _check_names(
  config: ModelConfig, paths: Mapping[str, object], tensors: Mapping, table: Sequence[Entry]
) -> None:
  covered = [entry.path for entry in table]
  wanted = [name for entry in table for name in _names(entry, config)]
  unique, present = set(wanted), set(tensors)
  problems = {
    "parameters without an entry in the table": set(paths) - set(covered),
    "entries for parameters that the model does not have": set(covered) - set(paths),
    "parameters filled twice": {path for path in covered if covered.count(path) > 1},
    "tensors used twice": {name for name in unique if wanted.count(name) > 1},
    "missing tensors": unique - present,
    "unknown tensors": present - unique,
  }
  found = [f"{what}: {', '.join(sorted(names))}" for what, names in problems.items() if names]
  if found:
    raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(found))


def _pieces(
  entry: Entry, shape: tuple[int, ...], config: ModelConfig
) -> Iterator[tuple[tuple, str]]:
  """(where in our parameter, name of the tensor that stands there) for every tensor of an entry."""
  width = shape[-1] // len(entry.sources)
  axes = [
    range(size)
    for name, size in (("{layer}", config.num_layers), ("{expert}", config.num_experts))
    if name in entry.sources[0]
  ]
  for index in np.ndindex(*(len(axis) for axis in axes)):
    layer, expert = (*index, 0, 0)[:2]
    for i, source in enumerate(entry.sources):
      where = (*index, ..., slice(i * width, (i + 1) * width))
      yield where, source.format(layer=layer, expert=expert)


def _assemble(
  entry: Entry, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray], config: ModelConfig
) -> Float32[np.ndarray, "..."]:
  """One parameter of ours with the given shape."""
  result = np.empty(shape, np.float32)
  for where, name in _pieces(entry, shape, config):
    ours = result[where]
    expected = (ours.swapaxes(-1, -2) if entry.transpose else ours).shape
    array = tensors[name]
    if array.shape != expected:
      raise CheckpointError(
        f"{name} has shape {array.shape}, but {entry.path} of this model needs {expected}"
      )
    if entry.rotary_heads:
      array = rotary_halves(array, entry.rotary_heads)
    ours[...] = array.swapaxes(-1, -2) if entry.transpose else array
  return result


def tensors_from_params(
  config: ModelConfig, params: nnx.State, table: Sequence[Entry]
) -> dict[str, np.ndarray]:
  """The inverse of ``params_from_tensors``: the checkpoint's tensors, in the parameters' own dtype.

  They are views wherever that is possible, so a host needs memory for the parameters once.

  Raises CheckpointError naming what the table does not cover and what the parameters lack (those of
  a critic, for one).
  """
  leaves = {"/".join(str(part) for part in path): leaf for path, leaf in nnx.to_flat_state(params)}
  covered = {entry.path for entry in table}
  if odd := covered.symmetric_difference(leaves):
    raise CheckpointError(
      f"the parameters do not fit the table: {', '.join(sorted(odd))} is in only one of the two"
    )
  tensors = {}
  for entry in table:
    array = np.asarray(leaves[entry.path][...])
    for where, name in _pieces(entry, array.shape, config):
      tensor = array[where].swapaxes(-1, -2) if entry.transpose else array[where]
      tensors[name] = rotary_pairs(tensor, entry.rotary_heads) if entry.rotary_heads else tensor
  return tensors


def load_gguf(
  file: gguf.GGUFFile, base: ModelConfig | None = None
) -> tuple[ModelConfig, nnx.State]:
  """Model configuration and parameters of a GGUF file; see ``gguf.model_config`` for ``base``."""
  config = gguf.model_config(file, base)
  return config, params_from_tensors(config, file, gguf_table(config, file.architecture))
