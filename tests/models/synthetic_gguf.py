"""Tiny GGUF files, and what llama.cpp would compute from them, in float64 numpy.

The forward reads the file's own tensors in the file's own conventions: architecture ``llama`` rotates
neighbouring rows of a head, the others rotate halves.
"""

import pathlib

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB = 2, 64, 4, 2, 96, 40
EPS, THETA = 1e-5, 500.0
QUANTISED = {"ffn_down": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1", "attn_q": "Q4_1"}

TOKENS = ["<|endoftext|>", "<|im_start|>", *"0123456789+-*=abcdefghijklmn", "Ġ", "Ċ", "ab", "abc"]
TOKENS += ["Ġ+", "<user>", *(f"[PAD{i}]" for i in range(VOCAB - len(TOKENS) - 2))]
MERGES = ["a b", "ab c", "Ġ +"]


def tensors(arch: str, *, tied: bool = True, experts: int = 0, head_dim: int = 16) -> dict:
  """Random float32 tensors under GGUF's names."""
  rng = np.random.default_rng(0)

  def matrix(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

  def norm(size: int) -> np.ndarray:
    return (1 + 0.3 * rng.standard_normal(size)).astype(np.float32)

  q, kv = HEADS * head_dim, KV_HEADS * head_dim
  result = {"token_embd.weight": matrix(VOCAB, WIDTH), "output_norm.weight": norm(WIDTH)}
  if not tied:
    result["output.weight"] = matrix(VOCAB, WIDTH)
  for i in range(LAYERS):
    block = {
      "attn_norm.weight": norm(WIDTH),
      "ffn_norm.weight": norm(WIDTH),
      "attn_q.weight": 3 * matrix(q, WIDTH),
      "attn_k.weight": 3 * matrix(kv, WIDTH),
      "attn_v.weight": matrix(kv, WIDTH),
      "attn_output.weight": matrix(WIDTH, q),
    }
    if arch == "qwen2":
      block |= {f"attn_{n}.bias": norm(size) - 1 for n, size in (("q", q), ("k", kv), ("v", kv))}
    if arch.startswith("qwen3"):
      block |= {"attn_q_norm.weight": norm(head_dim), "attn_k_norm.weight": norm(head_dim)}
    stack, suffix = ((experts,), "_exps") if experts else ((), "")
    block[f"ffn_gate{suffix}.weight"] = matrix(*stack, FFN, WIDTH)
    block[f"ffn_up{suffix}.weight"] = matrix(*stack, FFN, WIDTH)
    block[f"ffn_down{suffix}.weight"] = matrix(*stack, WIDTH, FFN)
    if experts:
      block["ffn_gate_inp.weight"] = 3 * matrix(experts, WIDTH)
    result |= {f"blk.{i}.{name}": array for name, array in block.items()}
  return result


def write(
  path: pathlib.Path, arch: str, arrays: dict, *, extra: dict | None = None, pre: str = "smollm"
) -> pathlib.Path:
  """Writes a GGUF file; some matrices are quantised.  ``extra`` adds string or float metadata."""
  writer = gguf.GGUFWriter(path, arch)
  head_dim = arrays["blk.0.attn_q.weight"].shape[0] // HEADS
  writer.add_block_count(LAYERS)
  writer.add_embedding_length(WIDTH)
  writer.add_feed_forward_length(FFN)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_rope_freq_base(THETA)
  writer.add_layer_norm_rms_eps(EPS)
  if head_dim * HEADS != WIDTH:
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
  if "blk.0.ffn_gate_inp.weight" in arrays:
    writer.add_expert_count(len(arrays["blk.0.ffn_gate_inp.weight"]))
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(FFN)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(TOKENS)
  writer.add_token_types([3, 3] + [4 if t == "<user>" else 1 for t in TOKENS[2:]])
  writer.add_token_merges(MERGES)
  for key, value in (extra or {}).items():
    add = writer.add_string if isinstance(value, str) else writer.add_float32
    add(key, value)
  for name, array in arrays.items():
    kind = QUANTISED.get(name.split(".")[2]) if name.startswith("blk.") else None
    if kind and array.shape[-1] % 32 == 0 and name.endswith("weight"):
      type_ = gguf.GGMLQuantizationType[kind]
      writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    else:
      writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """The numbers in the file, after quantisation, as float64."""
  result = {}
  for tensor in gguf.GGUFReader(path).tensors:
    array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    result[tensor.name] = array.reshape(tuple(reversed(tensor.shape.tolist())))
  return result


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _rotate(x: np.ndarray, neighbours: bool) -> np.ndarray:
  """x [T, heads, hd], as complex numbers turned by position · θ^(−2i/hd)."""
  length, _, dim = x.shape
  angle = np.arange(length)[:, None, None] * THETA ** (-np.arange(0, dim, 2) / dim)
  first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else np.split(x, 2, -1)
  turned = (first + 1j * second) * np.exp(1j * angle)
  if neighbours:
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
  return np.concatenate([turned.real, turned.imag], -1)


def _swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
  z = x @ gate.T
  return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def forward(w: dict[str, np.ndarray], arch: str, ids: np.ndarray) -> np.ndarray:
  """Logits [T, V] of one sequence."""
  x = w["token_embd.weight"][ids]
  length = len(ids)
  for i in range(LAYERS):
    p = {k.removeprefix(f"blk.{i}."): v for k, v in w.items() if k.startswith(f"blk.{i}.")}
    h = _norm(x, p["attn_norm.weight"])
    heads = {}
    for n, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
      y = h @ p[f"attn_{n}.weight"].T + p.get(f"attn_{n}.bias", 0.0)
      y = y.reshape(length, count, -1)
      if f"attn_{n}_norm.weight" in p:
        y = _norm(y, p[f"attn_{n}_norm.weight"])
      heads[n] = y if n == "v" else _rotate(y, arch == "llama")
    out = np.zeros_like(heads["q"])
    for head in range(HEADS):
      group = head // (HEADS // KV_HEADS)
      scores = heads["q"][:, head] @ heads["k"][:, group].T / np.sqrt(out.shape[-1])
      scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      out[:, head] = weights / weights.sum(-1, keepdims=True) @ heads["v"][:, group]
    x = x + out.reshape(length, -1) @ p["attn_output.weight"].T
    h = _norm(x, p["ffn_norm.weight"])
    if "ffn_gate_inp.weight" not in p:
      x = x + _swiglu(h, p["ffn_gate.weight"], p["ffn_up.weight"], p["ffn_down.weight"])
      continue
    router = np.exp(h @ p["ffn_gate_inp.weight"].T)
    stacks = [p[f"ffn_{n}_exps.weight"] for n in ("gate", "up", "down")]
    for t in range(length):
      chosen = np.argsort(-router[t])[:2]
      for e in chosen:
        share = router[t, e] / router[t, chosen].sum()
        x[t] = x[t] + share * _swiglu(h[t], *(s[e] for s in stacks))
  return _norm(x, w["output_norm.weight"]) @ w.get("output.weight", w["token_embd.weight"]).T
