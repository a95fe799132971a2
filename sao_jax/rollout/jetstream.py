"""JetStream's Driver, subclassed where 0.2.2 needs it; the server is in ``server``."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.rollout._jetstream import JetstreamMetricsCollector, orchestrator
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.requests import DriverFailed, DriverStopped, Overloaded, RolloutRequest
from sao_jax.rollout.weights import WeightStore

logger = logging.getLogger(__name__)

_RACE = "At this point we must have some requests"


class RolloutDriver(orchestrator.Driver):
  """Runs a RolloutEngine: prefill, insert, generate, hand out, on four threads.

  A context manager.  ``stop`` (or leaving the context) ends every open request by name and joins
  every thread.  An exception in a thread ends every open request with DriverFailed and leaves the
  process alive; ``failure`` holds it, and a new driver may be started on the same engine.

  Args:
    engine: reset here: a driver starts without requests and rows.
    store: the weights; handed to the engine at each call.
    max_queued: requests accepted beyond the engine's slots; more are refused with Overloaded.
    metrics_collector: JetStream's own Prometheus gauges.
  """

  def __init__(
    self,
    engine: RolloutEngine,
    store: WeightStore,
    max_queued: int = 256,
    metrics_collector: JetstreamMetricsCollector | None = None,
  ) -> None:
    self.engine, self.store = engine, store
    self.max_open = engine.slots + max_queued
    self.failure: BaseException | None = None
    self.race_restarts = 0
    self._open: set[RolloutRequest] = set()
    self._open_lock = threading.Lock()
    engine.reset()
    # The stock constructor starts the threads: nothing may be set after it that they read.
    super().__init__(
      prefill_engines=[engine],
      generate_engines=[engine],
      prefill_params=[store],
      generate_params=[store],
      interleaved_mode=True,
      jax_padding=False,
      metrics_collector=metrics_collector,
    )
    _stop_at_exit(self)

  # --- requests ----------------------------------------------------------------------------------

  def submit(self, request: RolloutRequest) -> None:
    """Queues a request; its ``future`` ends in a Completion, an error, or cancellation.

    Raises:
      DriverStopped, DriverFailed: there is no running driver to place it on.
      Overloaded: slots and queue are full.
      BadRequest: the engine cannot serve it.
    """
    self.engine.validate(request.prefill_content, request.sampling)
    self.place_request_on_prefill_queue(request)

  def place_request_on_prefill_queue(self, request: RolloutRequest) -> None:
    """Bounded, and remembered so that ``stop`` and failures reach it; stock is neither."""
    with self._open_lock:
      if self.failure is not None:
        raise DriverFailed(_failed(self.failure)) from self.failure
      if not self.live:
        raise DriverStopped("the rollout driver is stopped")
      if len(self._open) >= self.max_open:
        raise Overloaded(
          f"{len(self._open)} requests are open and the limit is {self.max_open} "
          f"({self.engine.slots} slots + the queue): raise rollout.max_queued or run fewer at once"
        )
      self._open.add(request)
    request.engine = self.engine
    request.future.add_done_callback(lambda _: self._discard(request))
    super().place_request_on_prefill_queue(request)

  def _discard(self, request: RolloutRequest) -> None:
    with self._open_lock:
      self._open.discard(request)
    if request.future.cancelled():  # one that still waits must not take its turn
      backlog = self._prefill_backlog
      with backlog.mutex, contextlib.suppress(ValueError):
        backlog.queue.remove(request)

  def _end_open(self, error: BaseException) -> None:
    with self._open_lock:
      requests = list(self._open)
    for request in requests:
      request.fail(error)

  def _process_prefill_content(
    self, request: RolloutRequest, tokenizer: Any, is_bos: bool, max_prefill_length: int
  ) -> tuple[Any, int]:
    """Hands the engine the whole request: stock code would prepend BOS, cut long prompts silently
    and drop everything but the ids."""
    return request, len(request.prefill_content)

  # --- threads -----------------------------------------------------------------------------------

  def _guarded(self, thread: Callable[[int], None], idx: int) -> None:
    """Catches what a thread raises before JetThread sees it and kills the process."""
    try:
      thread(idx)
    except BaseException as error:
      logger.error(
        "rollout driver thread %s failed", threading.current_thread().name, exc_info=error
      )
      with self._open_lock:
        self.failure = self.failure or error
      failed = DriverFailed(_failed(error))
      failed.__cause__ = error
      self._end_open(failed)

  def _prefill_thread(self, idx: int) -> None:
    self._guarded(super()._prefill_thread, idx)

  def _transfer_thread(self, idx: int) -> None:
    self._guarded(super()._transfer_thread, idx)

  def _detokenize_thread(self, idx: int) -> None:
    self._guarded(self._hand_out, idx)

  def _hand_out(self, idx: int) -> None:
    """Gives each request its part of each step, and frees the slots of those that are complete.

    Stock code reads two array elements per column and slot, 0.9 ms a step for 32 slots where this
    takes 0.1, and detokenizes text that no one here reads.
    """
    backlog, free = self._detokenize_backlogs[idx], self._generate_slots[idx]
    busy: dict[int, RolloutRequest] = {}
    while self.live and (item := backlog.get()) is not None:
      slot, what = item
      if isinstance(what, RolloutRequest):
        busy[slot] = what
        continue
      result = np.asarray(what.data)
      ended = (result[:, what.valid_idx[1] - 1] == 0).tolist()
      complete = [slot for slot, request in busy.items() if request.take(result, ended[slot])]
      requests = [busy.pop(slot) for slot in complete]
      for slot in complete:
        free.put(slot, block=False)
      for request in requests:  # callers are woken last: no slot waits for them
        request.close()

  def _generate_thread(self, idx: int) -> None:
    stock = super()._generate_thread

    def until_stopped(i: int) -> None:
      while self.live:
        try:
          stock(i)
          return
        except AssertionError as error:
          # The last busy slot was freed between the stock loop's count of free slots and its
          # assertion.  It fires only when all slots are free, so entering again loses nothing.
          if _RACE not in str(error):
            raise
          self.race_restarts += 1

    self._guarded(until_stopped, idx)

  # --- the end -----------------------------------------------------------------------------------

  def stop(self) -> None:
    """Ends every open request with DriverStopped and joins every thread.  May be called twice."""
    with self._open_lock:
      self.live = False  # from here on nothing can be placed
    self._end_open(DriverStopped("the rollout driver was stopped while the request was open"))
    super().stop()

  def __enter__(self) -> "RolloutDriver":
    return self

  def __exit__(self, *exc: object) -> None:
    self.stop()

  @property
  def open_requests(self) -> int:
    with self._open_lock:
      return len(self._open)

  @property
  def free_slots(self) -> int:
    return self.engine.slots - int(self.engine.metrics()["active"])

  def metrics(self) -> dict[str, float]:
    """The engine's metrics, and what waits in front of it."""
    engine = self.engine.metrics()
    return {**engine, "queued": max(self.open_requests - engine["active"], 0.0)}


def _failed(error: BaseException) -> str:
  return f"the rollout driver failed: {type(error).__name__}: {error}"


def _stop_at_exit(driver: RolloutDriver) -> None:
  """A driver that was never stopped must not keep the interpreter from exiting: stock detokenize
  threads are no daemons.  Plain atexit runs after the join of such threads, which is too late."""
  reference = weakref.ref(driver)

  def stop() -> None:
    forgotten = reference()
    if forgotten is not None and any(t.is_alive() for t in forgotten._all_threads):
      logger.warning("a RolloutDriver was not stopped: stopping it at interpreter exit")
      forgotten.stop()

  threading._register_atexit(stop)  # type: ignore[attr-defined]
