"""What the engine keeps on the device for its slots, and the jitted functions that change it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from sao_jax.config import ModelConfig
from sao_jax.models import decode
from sao_jax.rollout.requests import MAX_STOP_IDS
from sao_jax.rollout.sampling import sample, token_uniform
from sao_jax.types import Sampling

_RECOMPUTE_BLOCK = 128  # tokens of all slots whose keys are rewritten in one call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
  """One row per slot.

  ``last`` is the newest token of the row and ``position`` its index: the cache holds the keys and
  values of the tokens before it.  ``history`` holds all tokens (kv=recompute; else no columns).
  """

  cache: decode.KVCache
  history: Int[Array, "B S"]
  position: Int[Array, "B"]
  last: Int[Array, "B"]
  remaining: Int[Array, "B"]
  top_k: Int[Array, "B"]
  keys: Array  # uint32 [B, 2]
  stop_ids: Int[Array, "B stops"]
  temperature: Float[Array, "B"]
  top_p: Float[Array, "B"]
  active: Bool[Array, "B"]


class Functions(NamedTuple):
  """The compiled side of an engine."""

  view: Callable[[Any], Any]
  init: Callable[[], DecodeState]
  empty_row: Callable[[], decode.KVCache]
  extend: Callable[..., decode.KVCache]
  take: Callable[..., decode.KVCache]
  insert: Callable[..., DecodeState]
  step: Callable[..., tuple[DecodeState, Array]]
  recompute: Callable[..., DecodeState]
  recompute_block: int


def request_row(
  tokens: np.ndarray, sampling: Sampling, max_len: int, slot: int, recompute: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(integers, floats, history) that ``Functions.insert`` unpacks: three transfers, not a dozen."""
  n = len(tokens)
  ints = np.full(7 + MAX_STOP_IDS, -1, np.int32)
  remaining = min(sampling.max_new_tokens, max_len - n)
  ints[:5] = slot, n - 1, tokens[-1], remaining, sampling.top_k
  ints[5:7] = np.asarray(sampling.key, np.uint32).view(np.int32)
  ints[7 : 7 + len(sampling.stop_ids)] = sampling.stop_ids
  history = np.zeros(max_len if recompute else 0, np.int32)
  if recompute:
    history[:n] = tokens
  return ints, np.asarray([sampling.temperature, sampling.top_p], np.float32), history


def _insert(
  state: DecodeState, row: decode.KVCache, ints: Array, floats: Array, history: Array
) -> DecodeState:
  slot = ints[0]
  columns = {"position": ints[1], "last": ints[2], "remaining": ints[3], "top_k": ints[4]}
  columns["keys"] = jax.lax.bitcast_convert_type(ints[5:7], jnp.uint32)
  columns["stop_ids"] = ints[7:]
  columns["temperature"], columns["top_p"] = floats[0], floats[1]
  columns["active"] = jnp.bool_(True)
  changed = {name: getattr(state, name).at[slot].set(x) for name, x in columns.items()}
  if state.history.shape[1]:
    changed["history"] = state.history.at[slot, : history.shape[0]].set(history)
  return dataclasses.replace(state, cache=decode.put_row(state.cache, row, slot), **changed)


def _one_token(
  config: ModelConfig, view: Any, state: DecodeState, version: Array
) -> tuple[DecodeState, tuple[Array, Array]]:
  """Forward, then sample: logits, log-prob and version of a token come from one read of weights."""
  rows = jnp.arange(state.last.shape[0])
  active, index = state.active, state.position + 1  # index of the token to be sampled
  hidden, cache = decode.extend(
    config, view, state.last[:, None], state.position, state.cache, valid=active[:, None]
  )
  logits = decode.logits(config, view, hidden[:, 0])
  uniform = token_uniform(state.keys, index)
  token, logprob, sampled = sample(
    logits, uniform, state.temperature, jnp.where(active, state.top_k, 0),
    jnp.where(active, state.top_p, 1.0),
  )  # fmt: skip
  remaining = state.remaining - active
  stopped = (state.stop_ids == token[:, None]).any(-1)
  done = active & (stopped | (remaining <= 0))
  changed: dict[str, Array] = {}
  if state.history.shape[1]:
    column = jnp.where(active, index, state.history.shape[1])
    changed["history"] = state.history.at[rows, column].set(token, mode="drop")
  state = dataclasses.replace(
    state, cache=cache, remaining=remaining, active=active & ~done,
    position=jnp.where(active, index, state.position), last=jnp.where(active, token, state.last),
    **changed,
  )  # fmt: skip
  bits = [
    jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in (logprob, sampled)
  ]
  frame = jnp.stack([token, *bits, jnp.full_like(token, version), jnp.zeros_like(token)], 1)
  valid = jnp.broadcast_to(active[:, None], frame.shape).at[:, -1].set(active & ~done)
  return state, (frame, valid.astype(jnp.int32))


def _step(
  config: ModelConfig, tokens: int, view: Any, state: DecodeState, version: Array, keep: Array
) -> tuple[DecodeState, Int[Array, "B columns"]]:
  """``tokens`` tokens per slot.  Columns: frames side by side, their validity, one unused."""
  state = dataclasses.replace(state, active=state.active & keep)

  def body(state, _):
    return _one_token(config, view, state, version)

  if tokens == 1:
    state, (frames, valid) = body(state, None)
  else:
    state, stacked = jax.lax.scan(body, state, length=tokens)
    frames, valid = (jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1) for x in stacked)
  return state, jnp.concatenate([frames, valid, jnp.zeros_like(frames[:, :1])], 1)


def _recompute(
  config: ModelConfig, block: int, view: Any, state: DecodeState, start: Array
) -> DecodeState:
  """Rewrites keys and values of tokens start … start + block − 1 of every active row."""
  slots = state.last.shape[0]
  tokens = jax.lax.dynamic_slice_in_dim(state.history, start, block, 1)
  index = start + jnp.arange(block)[None]
  valid = state.active[:, None] & (index < state.position[:, None])
  _, cache = decode.extend(
    config, view, tokens, jnp.broadcast_to(start, (slots,)), state.cache, valid=valid
  )
  return dataclasses.replace(state, cache=cache)


def functions(
  config: ModelConfig, slots: int, max_len: int, *, recompute: bool, tokens_per_step: int
) -> Functions:
  """Compiled once per (model, slots, max_len, …) in a process, however many engines use them."""
  fields = dataclasses.astuple(config)
  return _functions(fields, slots, max_len, recompute, tokens_per_step)


@functools.lru_cache(maxsize=16)
def _functions(
  fields: tuple, slots: int, max_len: int, recompute: bool, tokens_per_step: int
) -> Functions:
  config = ModelConfig(*fields)
  block = min(_RECOMPUTE_BLOCK, max_len)
  width = -(-max_len // block) * block if recompute else 0

  def init() -> DecodeState:
    integers = {
      name: jnp.zeros(slots, jnp.int32) for name in ("position", "last", "remaining", "top_k")
    }
    return DecodeState(
      cache=decode.init_cache(config, slots, max_len),
      history=jnp.zeros((slots, width), jnp.int32),
      keys=jnp.zeros((slots, 2), jnp.uint32),
      stop_ids=jnp.full((slots, MAX_STOP_IDS), -1, jnp.int32),
      temperature=jnp.ones(slots),
      top_p=jnp.ones(slots),
      active=jnp.zeros(slots, bool),
      **integers,
    )

  def extend(view, tokens, start, n, cache):
    valid = (jnp.arange(tokens.shape[1]) < n)[None]
    return decode.extend(config, view, tokens, start[None], cache, valid=valid)[1]

  return Functions(
    view=functools.partial(decode.decode_view, config=config),
    init=init,
    empty_row=lambda: decode.init_cache(config, 1, max_len),
    extend=jax.jit(extend),
    take=jax.jit(decode.take_row),
    insert=jax.jit(_insert, donate_argnums=0),
    step=jax.jit(functools.partial(_step, config, tokens_per_step), donate_argnums=1),
    recompute=jax.jit(functools.partial(_recompute, config, block), donate_argnums=1),
    recompute_block=block,
  )


def warmup_jobs(
  f: Functions, view: Any, sizes: tuple[int, ...], slots: int, max_len: int, recompute: bool
) -> list[tuple[str, Callable[[], Any]]]:
  """(what, call) of everything that serving compiles.  To be called in order, on scratch arrays."""
  state, row = f.init(), f.empty_row()
  request = request_row(np.zeros(2, np.int32), Sampling(1), max_len, 0, recompute)

  def prefill(size: int) -> Any:
    return f.extend(view, np.zeros((1, size), np.int32), np.int32(0), np.int32(size), row)

  def insert() -> Any:
    nonlocal state  # the functions that follow get, as in serving, what another one returned
    state = f.insert(state, row, *request)
    return state

  def rewrite() -> Any:
    nonlocal state
    state = f.recompute(view, state, np.int32(0))
    return state

  jobs: list[tuple[str, Callable[[], Any]]] = [
    (f"prefill of {size} tokens", functools.partial(prefill, size)) for size in sizes
  ]
  jobs += [("take a row", lambda: f.take(state.cache, np.int32(0))), ("insert a row", insert)]
  jobs += [("recompute", rewrite)] if recompute else []
  return [*jobs, ("decode step", lambda: f.step(view, state, np.int32(0), np.ones(slots, bool)))]
