"""One request to the engine, and the errors that it can end with."""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sao_jax.rollout._jetstream import orchestrator
from sao_jax.types import Completion, Sampling, Version

if TYPE_CHECKING:
  from sao_jax.rollout.engine import RolloutEngine

COLUMNS = 4  # int32 per token: token, bits(logprob), bits(sampled logprob), version
FRAME = COLUMNS + 1  # on the device: the validity of the last column says whether more follows
MAX_STOP_IDS = 8
_UNBOUNDED = 2**31 - 1


class EngineFailure(RuntimeError):
  """Infrastructure failed: the request has no result, and may be retried."""


class BadRequest(ValueError):
  """The request itself cannot be served; trying again would not help."""


class DriverStopped(EngineFailure):
  """The driver was stopped while the request was open, or before it was placed."""


class DriverFailed(EngineFailure):
  """A driver thread raised; the cause is chained."""


class Overloaded(EngineFailure):
  """The driver's bounded queue is full."""


class StaleIncarnation(EngineFailure):
  """The trainer restarted: the session belongs to weights of an older incarnation."""


def stale_incarnation(mine: int, now: int) -> StaleIncarnation:
  return StaleIncarnation(
    f"the session was opened under incarnation {mine}, but the engine now serves incarnation "
    f"{now}: start the episode again"
  )


def check_request(tokens: np.ndarray, sampling: Sampling, max_len: int, vocab_size: int) -> None:
  """Raises BadRequest for what an engine of this size cannot serve, with both numbers."""
  if not 1 <= len(tokens) < max_len:
    raise BadRequest(
      f"a prompt of {len(tokens)} tokens: this engine takes 1 to {max_len - 1} (one slot holds "
      f"rollout.max_len = {max_len} tokens, the sampled ones included)"
    )
  if tokens.min() < 0 or tokens.max() >= vocab_size:
    raise BadRequest(
      f"token ids {tokens.min()} … {tokens.max()}: the model has ids 0 … {vocab_size - 1}"
    )
  if sampling.max_new_tokens < 1:
    raise BadRequest(f"max_new_tokens = {sampling.max_new_tokens}: at least 1 is needed")
  if len(sampling.stop_ids) > MAX_STOP_IDS:
    raise BadRequest(f"{len(sampling.stop_ids)} stop ids: a request may have {MAX_STOP_IDS}")
  if any(not 0 <= stop < vocab_size for stop in sampling.stop_ids):
    raise BadRequest(f"stop ids {sampling.stop_ids}: the model has ids 0 … {vocab_size - 1}")
  if any(not 0 <= word < 2**32 for word in sampling.key):
    raise BadRequest(f"key = {sampling.key}: each of its two words is in [0, 2³²)")
  if sampling.top_k >= 2**31:
    raise BadRequest(f"top_k = {sampling.top_k}: at most {2**31 - 1} (0 switches it off)")
  if sampling.temperature and not 1e-6 <= sampling.temperature <= 1e6:
    raise BadRequest(
      f"temperature = {sampling.temperature}: 0 is greedy, anything else lies in [1e-6, 1e6]"
    )
  if not 0 <= sampling.temperature < np.inf or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
    raise BadRequest(
      f"temperature = {sampling.temperature}, top_p = {sampling.top_p}, top_k = {sampling.top_k}: "
      "temperature and top_k are 0 or more, top_p is in (0, 1]"
    )


class RolloutRequest(orchestrator.ActiveRequest):
  """Token ids in, one ``Completion`` out, through ``future``.

  In the Driver it plays two parts: the request, and its own return channel (the Driver only ever
  closes that).  Nothing wakes up the caller before the request is complete, unless ``on_tokens`` is
  given, which is called on the Driver's thread with the new columns of each step.

  Cancelling ``future`` cancels the request: the slot is free at the next step.
  """

  def __init__(
    self,
    tokens: Sequence[int] | np.ndarray,
    sampling: Sampling,
    *,
    incarnation: int,
    session: str = "",
    on_tokens: Callable[[list[int]], None] | None = None,
  ) -> None:
    super().__init__(
      max_tokens=_UNBOUNDED,  # the engine ends a sample itself
      return_channel=self,
      prefill_content=np.asarray(tokens, np.int32),
      is_client_side_tokenization=True,
    )
    self.sampling = sampling
    self.incarnation = incarnation
    self.session = session
    self.on_tokens = on_tokens
    self.future: concurrent.futures.Future[Completion] = concurrent.futures.Future()
    self.engine: RolloutEngine | None = None
    self.slot: int | None = None
    self.error: BaseException | None = None
    self.prefill_version: Version | None = None
    self.placed = time.monotonic()
    self.complete: np.ndarray | None = None
    self._results: list[np.ndarray] = []
    self._sampled = np.zeros((COLUMNS, 0), np.int32)
    self._cancelled = False
    self.future.add_done_callback(self._note_cancel)
    self._settling = threading.Lock()

  def _note_cancel(self, future: concurrent.futures.Future[Completion]) -> None:
    self._cancelled = future.cancelled()

  # ActiveRequest compares by fields, which makes it unhashable; a request is itself.
  __hash__ = object.__hash__

  def __eq__(self, other: object) -> bool:
    return self is other

  @property
  def return_channel(self) -> "RolloutRequest":
    return self

  @return_channel.setter
  def return_channel(self, channel: object) -> None:
    """Ignored: stock ``stop`` sets None while its threads may still be about to close it."""

  def take(self, result: np.ndarray, ended: bool) -> bool:
    """Takes one step's result, int32 [slots, …] (see ``slots``); True: the request is complete.

    Runs for every slot at every step: it only keeps a reference, and looks at it at the end.
    """
    assert self.engine is not None
    if self.incarnation != (now := self.engine.version.incarnation) and self.error is None:
      self.error = stale_incarnation(self.incarnation, now)
    if self.error is not None or self._cancelled:
      self.engine.retire(self, None)
      return True
    self._results.append(result)
    if self.on_tokens is not None:
      self.on_tokens(_columns(result[self.slot][None]).reshape(-1).tolist())
    if ended:
      self._sampled = _columns(np.stack([step[self.slot] for step in self._results])).T
      self.engine.retire(self, np.concatenate([self.prefill_content, self._sampled[0]]))
    return ended

  @property
  def last_version(self) -> Version:
    return Version(self.incarnation, int(self._sampled[3, -1]))

  def close(self) -> None:
    """Ends the request with what it has."""
    # The future refers to this request: both wait for a full collection, the steps' arrays must not.
    self._results.clear()
    if self.future.done():  # cancelled, or ended with the driver
      return
    if self.error is not None:
      self.fail(self.error)
      return
    columns = np.ascontiguousarray(self._sampled)
    tokens = columns[0]
    stopped = len(tokens) > 0 and int(tokens[-1]) in self.sampling.stop_ids
    completion = Completion(
      tokens=tokens,
      logprobs=columns[1].view(np.float32),
      sampled_logprobs=columns[2].view(np.float32),
      policy_version=columns[3],
      temperature=self.sampling.temperature or 1.0,  # greedy reports log-probs at T = 1
      stop="stop" if stopped else "length",
      incarnation=self.incarnation,
    )
    self._settle(lambda: self.future.set_result(completion))

  def fail(self, error: BaseException) -> None:
    """Ends the request with ``error``, unless it has already ended."""
    self._settle(lambda: self.future.set_exception(error))

  def _settle(self, settle: Callable[[], None]) -> None:
    with self._settling:
      if not self.future.done():
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled just now
          settle()


def _columns(rows: np.ndarray) -> np.ndarray:
  """A slot's rows of some steps → the columns of the tokens that it sampled, [n, COLUMNS]."""
  width = rows.shape[1] // 2
  frames, valid = rows[:, :width].reshape(-1, FRAME), rows[:, width : 2 * width].reshape(-1, FRAME)
  return frames[valid[:, 0] != 0, :COLUMNS]
