"""RolloutEngine: JetStream's Engine over the policy, with log-probs and versions per token."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sao_jax.config import ModelConfig, RolloutConfig
from sao_jax.rollout import cache as rows
from sao_jax.rollout import slots
from sao_jax.rollout._jetstream import engine_api, tokenizer_api, tokenizer_pb2
from sao_jax.rollout.requests import (
  FRAME,
  BadRequest,
  EngineFailure,
  RolloutRequest,
  check_request,
  stale_incarnation,
)
from sao_jax.rollout.weights import WeightStore
from sao_jax.types import Sampling, Version

SPAN_GAP = 0.02  # seconds without a step that end a span of the engine's timeline


@dataclass(eq=False)
class Prefix:
  """A prefilled request.  No pytree: the Driver deletes the arrays of a Prefix after ``insert``,
  and a row from the prefix cache is shared."""

  request: RolloutRequest
  row: Any = None
  version: Version | None = None
  error: BaseException | None = None


class TokenIds(tokenizer_api.Tokenizer):
  """Token ids in, token ids out.  ``stop_tokens`` is empty: the engine decides when a sample ends,
  and the stop token itself must reach the trainer (it is an action)."""

  def __init__(self, pad_id: int) -> None:
    self._pad_id = pad_id

  def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
    raise ValueError("the rollout engine takes token ids, not text: encode prompts with data.chat")

  def decode(self, token_ids: list[int], **kwargs: Any) -> str:
    return ""

  @property
  def pad_id(self) -> int:
    return self._pad_id

  eos_id = bos_id = pad_id

  @property
  def stop_tokens(self) -> set[int]:
    return set()


class RolloutEngine(engine_api.Engine):
  """Continuous batching of one policy whose weights change while it runs.

  *Forward, then sample*: ``prefill`` writes keys and values of all tokens but the last;
  ``generate`` feeds the last token and samples the next, so a token's logits, log-prob and version
  come from one read of the ``WeightStore``.

  *Turns*: when a request ends, its row stays in the slot until another request needs that slot;
  then the row is parked in the ``RowCache``.  The session's next request takes the row from
  wherever it is and processes only the tokens that are new.  A waiting tool never holds a slot.

  *New weights*: with ``kv="keep"`` old keys and values stay, and each recorded log-prob is exactly
  that of the mixture that sampled the token; with ``"recompute"`` they are rewritten before the
  next token, so each log-prob equals a plain forward under the token's version.  Prefixes shared
  between prompts are keyed by version under both.

  *Bits*: decoding always runs at the full slot count, a prompt is cut into blocks by its own length
  only, an append has the shape of its own tokens.  A request's tokens and log-probs do not depend
  on slot, neighbours or arrival, as long as no parked session is evicted (``metrics``).

  Args:
    config: the model.
    rollout: slots, max_len, kv, steps_per_call, max_inflight, prefix_cache_mb.
    store: current weights; given its transform here if it has none.
    pad_id: id that padded positions are fed with.
  """

  def __init__(
    self, config: ModelConfig, rollout: RolloutConfig, store: WeightStore, pad_id: int = 0
  ) -> None:
    self.config, self.store, self.pad_id = dataclasses.replace(config), store, pad_id
    self.slots, self.max_len = rollout.slots, rollout.max_len
    self.recomputes = rollout.kv == "recompute"
    self.tokens_per_step, self.max_inflight = rollout.steps_per_call, rollout.max_inflight
    self.sizes = rows.bucket_sizes(self.max_len)
    self._f = slots.functions(
      self.config, self.slots, self.max_len, recompute=self.recomputes,
      tokens_per_step=self.tokens_per_step,
    )  # fmt: skip
    self._budget = rollout.prefix_cache_mb * 2**20
    if store.transform is None:
      store.use(self._f.view)
    self._mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("engine",))
    self._lock = threading.RLock()
    self.version = store.version
    self.reset()

  def reset(self) -> None:
    """Forgets every request, row and counter; the next driver starts from an empty state."""
    with self._lock:
      self._state: slots.DecodeState | None = None
      self._empty = self._f.empty_row()
      self._cache = rows.RowCache(self._budget)
      self._kept = rows.KeptRows(self._cache, self._read_row)
      self._requests: dict[int, RolloutRequest] = {}
      self._cancelled: set[int] = set()
      self._longest = np.zeros(self.slots, np.int64)  # upper bound of each row's length
      self._kv_version: Version | None = None
      self._stale = False
      self._inflight: deque[jax.Array] = deque()
      self._spans: deque[list[float]] = deque(maxlen=4096)
      self._counts = dict.fromkeys(
        ("steps", "tokens", "requests", "prefilled_tokens", "prefix_hits", "resumed",
         "recomputes", "slot_steps", "prefill_seconds", "generate_seconds"), 0.0,
      )  # fmt: skip

  # --- what the Driver calls -------------------------------------------------------------------

  def prefill(
    self,
    *,
    params: WeightStore,
    existing_prefix: Any = None,
    padded_tokens: Any,
    true_length: int,
  ) -> Prefix:
    """Keys and values of all tokens but the last.  ``padded_tokens`` is the RolloutRequest.

    A request that cannot be prefilled fails alone: the error travels in the Prefix.
    """
    request: RolloutRequest = padded_tokens
    began = time.monotonic()
    try:
      version, view = params.current()
      if request.incarnation != version.incarnation:
        raise stale_incarnation(request.incarnation, version.incarnation)
      if request.future.cancelled():
        raise EngineFailure("the request was cancelled before it was prefilled")
      self.validate(request.prefill_content, request.sampling)
      prefix = Prefix(request, self._prefill(request, version, view), version)
    except Exception as error:  # named to the one request that it concerns
      prefix = Prefix(request, error=_named(error))
    self._count(prefill_seconds=time.monotonic() - began)
    return prefix

  def insert(self, prefix: Prefix, decode_state: slots.DecodeState, slot: int) -> slots.DecodeState:
    """Puts a prefilled request into a free slot; whoever's row still lies there is parked."""
    with self._lock:
      request = prefix.request
      request.slot, request.prefill_version = slot, prefix.version
      self._requests[slot] = request
      if prefix.error is not None:
        request.error = prefix.error
        return decode_state  # the row is inactive, so the next step completes the request
      self._kept.vacate(slot)
      self._cancelled.discard(slot)
      self._stale |= self.recomputes and prefix.version != self._kv_version
      tokens = request.prefill_content
      self._longest[slot] = len(tokens)
      packed = slots.request_row(tokens, request.sampling, self.max_len, slot, self.recomputes)
      assert self._state is not None
      self._state = self._f.insert(self._state, prefix.row, *packed)
      prefix.row = None  # the request keeps its Prefix for as long as it lives
      return self._state

  def generate(
    self, params: WeightStore, decode_state: slots.DecodeState
  ) -> tuple[slots.DecodeState, engine_api.ResultTokens]:
    """One step: ``steps_per_call`` tokens for every active slot, all under one read of weights."""
    began = time.monotonic()
    with self._lock:
      version, view = params.current()
      self.version = version
      state = self._rewritten(view, version)
      keep = np.ones(self.slots, bool)
      keep[list(self._cancelled)] = False
      self._cancelled.clear()
      state, data = self._f.step(view, state, np.int32(version.step), keep)
      self._state = state
      self._longest += self.tokens_per_step
      self._counts["steps"] += 1
      self._counts["slot_steps"] += len(self._requests)
    # Were dispatch to run ahead, a finished slot would idle, and new weights wait, for that long.
    self._inflight.append(data)
    while len(self._inflight) > self.max_inflight:
      jax.block_until_ready(self._inflight.popleft())
    self._count(generate_seconds=time.monotonic() - began)
    self._note_span(began)
    width = FRAME * self.tokens_per_step
    return state, engine_api.ResultTokens(
      data=data, tokens_idx=(0, width), valid_idx=(width, 2 * width),
      length_idx=(2 * width, 2 * width + 1), samples_per_slot=1,
    )  # fmt: skip

  def init_decode_state(self, *args: Any, **kwargs: Any) -> slots.DecodeState:
    """The current state; a fresh one after ``reset``."""
    with self._lock:
      if self._state is None:
        self._state = self._f.init()
      return self._state

  def _note_span(self, began: float) -> None:
    """Steps without a gap that a person could see on a timeline are one span."""
    with self._lock:
      if self._spans and began - self._spans[-1][1] < SPAN_GAP:
        self._spans[-1][1] = time.monotonic()
      else:
        self._spans.append([began, time.monotonic()])

  def take_spans(self) -> list[list[float]]:
    """[start, end] in ``time.monotonic`` seconds of what was decoded since the last call."""
    with self._lock:
      spans = list(self._spans)
      self._spans.clear()
    return spans

  # --- rows --------------------------------------------------------------------------------------

  def _prefill(self, request: RolloutRequest, version: Version, view: Any) -> Any:
    """The row of ``request``, from a kept row or shared prefix as far as one goes."""
    tokens = request.prefill_content[:-1]
    kept = self._take_kept(request.session, version)
    have = rows.common_prefix(kept.tokens, tokens) if kept is not None else 0
    if kept is not None and have:
      self._count(resumed=1, prefilled_tokens=len(tokens) - have)
      row = kept.cache
      for start, stop in rows.append_blocks(have, len(tokens), self.sizes):
        row = self._extend(view, row, tokens, start, stop)
      return row
    ends = rows.prefix_ids(tokens, self.sizes)
    with self._lock:
      have, prefix = self._cache.find_prefix(ends, version)
      shared = self._cache.worth_keeping(ends)
    self._count(prefix_hits=float(have > 0), prefilled_tokens=len(tokens) - have)
    row = prefix.cache if prefix is not None else self._empty
    for start, stop in rows.prompt_blocks(len(tokens), self.sizes):
      if stop > have:
        row = self._extend(view, row, tokens, start, stop)
        if stop == shared:
          with self._lock:
            self._cache.put_prefix(ends[stop], rows.Row(row, tokens[:stop], version))
    return row

  def _extend(self, view: Any, row: Any, tokens: np.ndarray, start: int, stop: int) -> Any:
    n = stop - start
    padded = np.full((1, rows.bucket(n, self.sizes)), self.pad_id, np.int32)
    padded[0, :n] = tokens[start:stop]
    return self._f.extend(view, padded, np.int32(start), np.int32(n), row)

  def _take_kept(self, session: str, version: Version) -> rows.Row | None:
    """The session's row, if it may be used; it is removed from where it was."""
    with self._lock:
      row = self._kept.take(session)
    return row if row is not None and (row.version == version or not self.recomputes) else None

  def _read_row(self, slot: int) -> Any:
    assert self._state is not None
    return self._f.take(self._state.cache, np.int32(slot))

  def _rewritten(self, view: Any, version: Version) -> slots.DecodeState:
    """kv=recompute: keys and values of every active row under ``version``."""
    state = self._state
    assert state is not None
    if not self.recomputes:
      return state
    if self._requests and (self._stale or self._kv_version != version):
      longest = min(max(int(self._longest[slot]) for slot in self._requests), self.max_len)
      for start in range(0, longest, self._f.recompute_block):
        state = self._f.recompute(view, state, np.int32(start))
      self._counts["recomputes"] += 1
    self._stale, self._kv_version = False, version
    return state

  # --- what requests and clients call ------------------------------------------------------------

  def retire(self, request: RolloutRequest, tokens: np.ndarray | None) -> None:
    """The request leaves its slot; with ``tokens`` its row stays there for the session."""
    with self._lock:
      slot = request.slot
      assert slot is not None
      self._requests.pop(slot, None)
      self._counts["requests"] += 1
      if tokens is None:
        self._cancelled.add(slot)
        return
      self._counts["tokens"] += len(tokens) - len(request.prefill_content)
      if request.session:
        self._kept.leave(request.session, slot, tokens[:-1], request.last_version)

  def forget(self, session: str) -> None:
    """Drops the session's row."""
    with self._lock:
      self._kept.forget(session)

  def validate(self, tokens: np.ndarray, sampling: Sampling) -> None:
    """Raises BadRequest (a ValueError) for what this engine cannot serve, with both numbers."""
    check_request(tokens, sampling, self.max_len, self.config.vocab_size)

  def warmup(self, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compiles everything before the first request; ``progress(what, done, of)`` after each."""
    jobs = slots.warmup_jobs(
      self._f, self.store.current()[1], self.sizes, self.slots, self.max_len, self.recomputes
    )
    for done, (what, job) in enumerate(jobs, 1):
      jax.block_until_ready(job())
      if progress is not None:
        progress(what, done, len(jobs))

  def _count(self, **amounts: float) -> None:
    with self._lock:
      for name, amount in amounts.items():
        self._counts[name] += amount

  def metrics(self) -> dict[str, float]:
    """Counters since the driver started, and what is held now.

    ``slot_use`` is the share of slots that a step decoded for a request.  The seconds are wall time
    inside ``prefill`` and ``generate``, which run on two threads.
    """
    with self._lock:
      steps = self._counts["steps"]
      return {
        **self._counts,
        "active": float(len(self._requests)),
        "resident": float(len(self._kept)),
        "parked": float(self._kept.parked),
        "slot_use": self._counts["slot_steps"] / (steps * self.slots) if steps else 0.0,
        "row_cache_bytes": float(self._cache.nbytes),
        "evicted_prefixes": float(self._cache.evicted_prefixes),
        "evicted_sessions": float(self._cache.evicted_sessions),
      }

  # --- the rest of the Engine API ----------------------------------------------------------------

  def load_params(self, *args: Any, **kwargs: Any) -> WeightStore:
    return self.store

  def get_prefix_destination_sharding(self) -> Any:
    return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

  def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
    return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

  def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> TokenIds:
    return TokenIds(self.pad_id)

  @property
  def max_concurrent_decodes(self) -> int:
    return self.slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    return self.max_len - 1

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    return None


def _named(error: Exception) -> Exception:
  if isinstance(error, EngineFailure | BadRequest):
    return error
  failure = EngineFailure(f"prefill failed: {type(error).__name__}: {error}")
  failure.__cause__ = error
  return failure
