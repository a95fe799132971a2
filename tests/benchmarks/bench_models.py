"""Head, experts, decode, prefill and training step (bars 4–9b, 11) against torch and transformers.

The 15.5M MoE: 4 layers, d 256, 4 heads / 2 KV, 8 experts top-2, F 512, V 4096.  Weights are taken
from the transformers model where it is installed, and each row checks that both sides agree.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sao_jax.config import ModelConfig
from sao_jax.kernels.losses import dis_loss
from sao_jax.models import decode, head, moe, transformer
from sao_jax.rollout.sampling import sample
from tests.benchmarks.harness import Row, Timings, blocking, interleave, peer

BAND = {"eps_low": 0.3, "eps_high": 5.0}
PEERS = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
NO_PEER = "" if PEERS else "torch or transformers not installed; our figure alone"


def rows(quick: bool) -> list[Row]:
  rounds = 3 if quick else 7
  table = _head_rows(rounds, quick) + _head_memory_rows()
  for d, experts in ((256, 8), (512, 16)):
    table += _moe_rows(d, experts, rounds)
  for batch in (8, 32) if quick else (1, 8, 32, 64):
    table.append(_decode_row(batch, max(2, rounds // 2)))
  table += _attention_rows(rounds)
  if not quick:
    table.append(_prefill_row(3))
  return [*table, _train_row(max(3, rounds // 2))]


def _row(bar: str, measure: str, timings: Timings, name: str, must: float, best: float) -> Row:
  ours = timings.median("ours")
  if not PEERS:
    return Row(bar, measure, ours, peer=name, must=must, excellent=best, note=NO_PEER)
  theirs, ratio = timings.median(name), timings.ratio("ours", name)
  return Row(bar, measure, ours, "s", name, theirs, ratio, must, best)


# ---- head


def _head_data(n: int, d: int, v: int):
  rng = np.random.default_rng(0)
  f32 = np.float32
  return {
    "hidden": rng.standard_normal((n, d)).astype(f32),
    "head": (rng.standard_normal((d, v)) / d**0.5).astype(f32),
    "targets": rng.integers(0, v, n),
    "advantages": rng.standard_normal(n).astype(f32),
    "old": (-np.log(v) - 0.5 + 0.3 * rng.standard_normal(n)).astype(f32),
  }


def _our_head(budget_mb: int = 256):
  def loss_fn(logprobs, extras):
    loss, masked = dis_loss(logprobs, extras["old"], extras["advantages"], **BAND)
    return loss, {"masked": masked}

  def f(hidden, w, targets, extras):
    ones, mask = jnp.ones(targets.shape), jnp.ones(targets.shape, bool)
    return head.token_loss(hidden, w, targets, ones, mask, extras, loss_fn, budget_mb)

  return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))


def _head_rows(rounds: int, quick: bool) -> list[Row]:
  n, d, v = (1024, 512, 32768) if quick else (4096, 512, 32768)
  data = _head_data(n, d, v)
  extras = {k: jnp.asarray(data[k])[None] for k in ("old", "advantages")}
  args = (jnp.asarray(data["hidden"])[None], jnp.asarray(data["head"]))
  ours = blocking(_our_head(), *args, jnp.asarray(data["targets"], jnp.int32)[None], extras)
  sides: dict[str, Callable[[], object]] = {"ours": ours}
  if PEERS:
    sides["torch"] = peer(_torch_head(data))
    (total, _), (_, gw) = ours()
    loss, expected = sides["torch"]()
    np.testing.assert_allclose(total, loss, rtol=1e-3)
    np.testing.assert_allclose(gw, expected, atol=1e-3 * np.abs(expected).max())
  timings = interleave(sides, rounds=rounds, warmup=1)
  work = 3 * 2 * n * d * v / timings.median("ours") / 1e9
  left, right = jnp.ones((512, d)), args[1]
  alone = interleave({"ours": blocking(jax.jit(jnp.matmul), left, right)}, rounds=rounds)
  limit = 2 * 512 * d * v / alone.median("ours") / 1e9
  row = _row("4", f"log-prob + entropy + DIS fwd+bwd {n}×{d}×{v}", timings, "torch", 0.80, 0.62)
  share = Row("4", "  share of the three-matmul limit", work / limit, "", must=0.0, excellent=0.85)
  limit_text = f"{work:.0f} of {limit:.0f} GFLOP/s"
  share = Row(**{**vars(share), "higher_is_better": True, "limit": limit_text, "must": None})
  return [row, share]


def _torch_head(data) -> Callable[[], Any]:
  import torch

  torch.set_num_threads(1)
  hidden, w = (torch.from_numpy(data[k]).requires_grad_() for k in ("hidden", "head"))
  targets, advantages, old = (torch.from_numpy(data[k]) for k in ("targets", "advantages", "old"))

  def run():
    hidden.grad = w.grad = None
    logp = torch.log_softmax(hidden @ w, -1)
    picked = logp.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
      entropy = -(logp.exp() * logp).sum(-1)
      ratio = (picked - old).exp()
      kept = (ratio > 1 - BAND["eps_low"]) & (ratio < 1 + BAND["eps_high"])
      weight = torch.where(kept, ratio, torch.zeros_like(ratio))
    loss = -(weight * advantages * picked).sum()
    loss.backward()
    del entropy
    return float(loss.detach()), w.grad.numpy()

  return run


def _head_memory_rows() -> list[Row]:
  table = []
  for v, must, best in ((32768, 256.0, 100.0), (151936, 700.0, 450.0)):
    shape = jax.ShapeDtypeStruct
    tokens = shape((1, 4096), jnp.float32)
    extras = {"old": tokens, "advantages": tokens}
    like = shape((1, 4096, 512), jnp.float32), shape((512, v), jnp.float32)
    lowered = _our_head().lower(*like, shape((1, 4096), jnp.int32), extras)
    mib = lowered.compile().memory_analysis().temp_size_in_bytes / 2**20
    full = f"full logits: {4096 * v * 4 / 2**20:.0f} MiB"
    row = Row(
      "5", f"head's temporaries, V = {v}", mib, "MiB", must=must, excellent=best, limit=full
    )
    table.append(row)
  return table


# ---- experts


def _hf_config(**changes):
  from transformers import Qwen3MoeConfig

  shape = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
  }
  return Qwen3MoeConfig(**{**shape, **changes})


def _moe_rows(d: int, experts: int, rounds: int, n: int = 2048, f: int = 512) -> list[Row]:
  keys = jax.random.split(jax.random.key(0), 5)
  p = {
    "router": jax.random.normal(keys[0], (d, experts)) * d**-0.5,
    "w_gate_up": jax.random.normal(keys[1], (experts, d, 2 * f)) * 0.05,
    "w_down": jax.random.normal(keys[2], (experts, f, d)) * 0.05,
  }
  x, g = jax.random.normal(keys[3], (n, d)), jax.random.normal(keys[4], (n, d))
  config = ModelConfig(num_experts=experts, experts_per_token=2, moe_impl="blocks")
  live = jnp.ones(n, bool)

  def loss(p, x):
    return (moe.feed_forward(config, p, x, live, config.moe_block_train)[0] * g).sum()

  sides = {"ours": blocking(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), p, x)}
  if PEERS:
    for kind in ("eager", "grouped_mm"):
      sides[kind] = peer(_torch_moe(p, x, g, d, experts, kind))
      np.testing.assert_allclose(sides["ours"]()[0], sides[kind](), rtol=1e-3)  # type: ignore
  timings = interleave(sides, rounds=rounds, warmup=1)
  name = f"MoE fwd+bwd, {n} tokens, D{d} F{f} E{experts} k2"
  bounds = (("eager", 1.15, 1.0), ("grouped_mm", 1.35, 1.15))
  return [_row("6", name, timings, kind, must, best) for kind, must, best in bounds]


def _torch_moe(p, x, g, d: int, experts: int, kind: str) -> Callable[[], Any]:
  import torch
  from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

  torch.set_num_threads(1)
  config = _hf_config(hidden_size=d, num_experts=experts)
  config._experts_implementation = kind
  block = Qwen3MoeSparseMoeBlock(config)
  with torch.no_grad():
    block.gate.weight.copy_(_tensor(p["router"].T))
    block.experts.gate_up_proj.copy_(_tensor(p["w_gate_up"].transpose(0, 2, 1)))
    block.experts.down_proj.copy_(_tensor(p["w_down"].transpose(0, 2, 1)))
  inputs, cotangent = _tensor(x)[None].requires_grad_(), _tensor(g)[None]

  def run():
    block.zero_grad(set_to_none=True)
    inputs.grad = None
    loss = (block(inputs) * cotangent).sum()
    loss.backward()
    return float(loss.detach())

  return run


def _tensor(x):
  import torch

  return torch.from_numpy(np.array(x))


# ---- the 15.5M MoE


SMALL = ModelConfig(
  vocab_size=4096,
  d_model=256,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=64,
  d_ff=512,
  num_experts=8,
  experts_per_token=2,
  moe_impl="blocks",
)


@functools.cache
def _small() -> tuple[Any, Any]:
  """(graphdef, params) of the 15.5M MoE with weights of a deviation that transformers' get too."""
  graphdef, params = transformer.init_params(SMALL, 0)
  return graphdef, params


def _torch_small(kind: str = "eager"):
  """The transformers model with our weights."""
  import torch
  from transformers import Qwen3MoeForCausalLM

  torch.set_num_threads(1)
  model = Qwen3MoeForCausalLM(_hf_config()).eval()
  model.config._experts_implementation = kind
  p = nnx.to_pure_dict(_small()[1])
  stacked = p["layers"]
  with torch.no_grad():
    model.model.embed_tokens.weight.copy_(_tensor(p["embed"]))
    model.model.norm.weight.copy_(_tensor(p["final_norm"]))
    model.lm_head.weight.copy_(_tensor(p["head"].T))
    for i, layer in enumerate(model.model.layers):
      attention, ffn = (jax.tree.map(lambda x: x[i], stacked[k]) for k in ("attention", "ffn"))  # noqa: B023
      for name in "qkvo":
        getattr(layer.self_attn, f"{name}_proj").weight.copy_(_tensor(attention[f"w{name}"].T))
      layer.mlp.gate.weight.copy_(_tensor(ffn["router"].T))
      layer.mlp.experts.gate_up_proj.copy_(_tensor(ffn["w_gate_up"].transpose(0, 2, 1)))
      layer.mlp.experts.down_proj.copy_(_tensor(ffn["w_down"].transpose(0, 2, 1)))
  return model


def _prompts(batch: int, length: int) -> np.ndarray:
  return np.random.default_rng(0).integers(1, SMALL.vocab_size, (batch, length))


@functools.partial(jax.jit, donate_argnums=2, static_argnums=0)
def _prefill(config, view, cache, tokens):
  hidden, cache = decode.extend(config, view, tokens, jnp.zeros(len(tokens), jnp.int32), cache)
  return decode.logits(config, view, hidden[:, -1]), cache


def _sample(logits, key):
  b = logits.shape[0]
  uniform, ones, zeros = jax.random.uniform(key, (b,)), jnp.ones(b), jnp.zeros(b, jnp.int32)
  return sample(logits, uniform, ones, zeros, ones)[:2]


@functools.partial(jax.jit, donate_argnums=2, static_argnums=(0, 5))
def _generate(config, view, cache, logits, start, steps):
  def step(carry, i):
    cache, logits = carry
    tokens, logprobs = _sample(logits, jax.random.fold_in(jax.random.key(0), i))
    at = jnp.full((tokens.shape[0],), start + i)
    hidden, cache = decode.extend(config, view, tokens[:, None], at, cache)
    return (cache, decode.logits(config, view, hidden[:, 0])), (tokens, logprobs)

  return jax.lax.scan(step, (cache, logits), jnp.arange(steps))


def _decode_row(batch: int, rounds: int, prompt: int = 32, new: int = 64) -> Row:
  config = ModelConfig(**{**vars(SMALL), "moe_block_decode": 16 if batch >= 64 else 8})
  config = transformer.static_config(config)
  view = decode.decode_view(_small()[1], config)
  ids = _prompts(batch, prompt)
  tokens = jnp.asarray(ids, jnp.int32)

  def ours():
    cache = decode.init_cache(config, batch, prompt + new)
    logits, cache = _prefill(config, view, cache, tokens)
    return jax.block_until_ready(_generate(config, view, cache, logits, prompt, new)[1])

  sides: dict[str, Callable[[], object]] = {"ours": ours}
  if PEERS:
    import torch

    model, inputs = _torch_small(), torch.from_numpy(ids)
    want = model(inputs[:2]).logits[:, -1].detach().numpy()
    cache = decode.init_cache(config, batch, prompt + new)
    got = _prefill(config, view, cache, tokens)[0][:2]
    np.testing.assert_allclose(got, want[:batch], atol=1e-3 * np.abs(want).max())
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "top_k": 0}
    mask = torch.ones_like(inputs)

    def theirs():
      with torch.no_grad():
        return model.generate(inputs, attention_mask=mask, pad_token_id=0, **settings)

    sides["transformers generate"] = peer(theirs)
  timings = interleave(sides, rounds=rounds, warmup=1)
  must, best = {1: (2.0, 2.8), 8: (1.7, 2.2), 32: (1.4, 1.75), 64: (1.1, 1.35)}[batch]
  speed = {k: batch * new / timings.median(k) for k in sides}
  name, other = f"decode, batch {batch}, prompt {prompt}, {new} new", "transformers generate"
  if not PEERS:
    return Row("8", name, speed["ours"], "tok/s", peer=other, must=must, note=NO_PEER)
  ratio = timings.ratio(other, "ours")
  numbers = (speed["ours"], "tok/s", other, speed[other], ratio, must, best)
  return Row("8", name, *numbers, higher_is_better=True)


def _attention_rows(rounds: int, batch: int = 32) -> list[Row]:
  """Decode attention alone, all layers, at cache S: time per step against reading keys and values."""

  def one(s: int):
    cache = decode.init_cache(SMALL, batch, s)
    q = jnp.ones((batch, 1, SMALL.num_heads, SMALL.head_dim))
    mask = jnp.ones((batch, 1, s), bool)
    f = jax.jit(lambda c, q: [decode._attend(q, k, v, mask) for k, v in zip(c.keys, c.values)])
    text = f.lower(cache, q).compile().as_text()
    transposed = any("transpose(" in line and f",{s}" in line for line in text.splitlines())
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    return blocking(f, cache, q), size, transposed

  (short, _, _), (long, size, transposed) = one(1024), one(2048)
  flat = jnp.ones(size // 4)
  read = blocking(jax.jit(lambda x: x.reshape(-1, 1024).max(0)), flat)
  timings = interleave({"ours": long, "half": short, "read": read}, rounds=rounds)
  share = timings.ratio("read", "ours")
  growth = timings.ratio("ours", "half")
  note = "the cache is transposed" if transposed else "no transpose of the cache"
  limit = f"one pass over {size / 2**20:.0f} MiB: {timings.median('read') * 1e3:.1f} ms"
  return [
    Row("9", f"decode attention, cache 2048, batch {batch}: time", timings.median("ours")),
    Row("9", "  share of the read limit", share, "", limit=limit, note=note),
    Row("9", "  time at 2048 / at 1024 (2 = linear)", growth, ""),
  ]


def _prefill_row(rounds: int, batch: int = 8, length: int = 960) -> Row:
  config = transformer.static_config(SMALL)
  view, ids = decode.decode_view(_small()[1], config), _prompts(batch, length)
  tokens = jnp.asarray(ids, jnp.int32)

  def ours():
    cache = decode.init_cache(config, batch, 1024)
    return jax.block_until_ready(_prefill(config, view, cache, tokens))

  sides: dict[str, Callable[[], object]] = {"ours": ours}
  if PEERS:
    import torch

    model, inputs = _torch_small(), torch.from_numpy(ids)

    def theirs():
      with torch.no_grad():
        return model(inputs, use_cache=True, logits_to_keep=1)

    sides["transformers"] = peer(theirs)
  timings = interleave(sides, rounds=rounds, warmup=1)
  row = _row("9b", f"prefill {batch} × {length}", timings, "transformers", 1.25, 1.0)
  return Row(**{**vars(row), "must": None, "excellent": None})  # informative


# ---- training step


def _train_row(rounds: int, batch: int = 8, length: int = 256) -> Row:
  rng = np.random.default_rng(1)
  ids = _prompts(batch, length)
  shape = (batch, length)
  data = {
    "advantages": rng.standard_normal(shape).astype(np.float32),
    "old": (-8.5 + 0.2 * rng.standard_normal(shape)).astype(np.float32),
  }
  mask = rng.random(shape) < 0.7
  mask[:, 0] = False
  sides: dict[str, Callable[[], object]] = {"ours": _our_step(ids, data, mask)}
  if PEERS:
    sides["torch"] = peer(_torch_step(ids, data, mask))
    np.testing.assert_allclose(sides["ours"](), sides["torch"](), rtol=1e-3)  # type: ignore
  timings = interleave(sides, rounds=rounds, warmup=1)
  name = f"training step (DIS, AdamW), {batch * length} tokens, 15.5M MoE"
  return _row("11", name, timings, "torch", 1.25, 1.0)


def _our_step(ids, data, mask):
  graphdef, params = _small()
  params = jax.tree.map(jnp.copy, params)
  optimizer = optax.adamw(1e-5)
  state = [params, optimizer.init(params)]
  tokens, extras = jnp.asarray(ids, jnp.int32), jax.tree.map(jnp.asarray, data)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
  ones, on = jnp.ones(ids.shape), jnp.asarray(mask)

  def loss_fn(logprobs, extras):
    loss, masked = dis_loss(logprobs, extras["old"], extras["advantages"], **BAND)
    return loss, {"masked": masked}

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state):
    def loss(params):
      model = nnx.merge(graphdef, params)
      args = (tokens, positions, jnp.ones_like(tokens), ones, on, extras, loss_fn)
      (total, _), _ = transformer.policy_token_loss(model, *args)
      return total / on.sum()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  def run():
    state[0], state[1], value = step(*state)
    return float(value)

  return run


def _torch_step(ids, data, mask):
  import torch

  model = _torch_small().train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-4, fused=True)
  tokens, on = torch.from_numpy(ids), torch.from_numpy(mask[:, 1:])
  advantages, old = (torch.from_numpy(data[k][:, 1:]) for k in ("advantages", "old"))

  def run():
    optimizer.zero_grad(set_to_none=True)
    logits = model(tokens, use_cache=False).logits[:, :-1]
    logp = logits.gather(-1, tokens[:, 1:, None])[..., 0] - torch.logsumexp(logits, -1)
    ratio = (logp.detach() - old).exp()
    kept = (ratio > 1 - BAND["eps_low"]) & (ratio < 1 + BAND["eps_high"]) & on
    loss = -(torch.where(kept, ratio * advantages, 0.0) * logp).sum() / on.sum()
    loss.backward()
    optimizer.step()
    return float(loss.detach())

  return run
