"""Many episodes at once, on one thread with one event loop, feeding the queue.

Failure means infrastructure only, and never a reward of 0: a failed episode is tried again under a
new sampling key, and when its attempts are used up its task is quarantined.  What the model does
wrong never comes here as an exception.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from sao_jax.config import Config
from sao_jax.data.chat import Chat
from sao_jax.envs.base import Env, EnvFailure
from sao_jax.outcome import RunFailed
from sao_jax.rollout.client import Client, EngineFailure
from sao_jax.rollout.episode import (
  EpisodeLimits,
  EpisodeStalled,
  Progress,
  TaskRefused,
  run_episode,
  sampling_key,
)
from sao_jax.rollout.queue import INCOMPLETE, TrajectoryQueue
from sao_jax.types import Episode, Sampling, Task, Version

log = logging.getLogger(__name__)

ENGINE = EngineFailure.__name__  # reasons that are the engine's start with it
TICK_SECONDS = 0.5  # how often running episodes are looked over
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0  # seconds before an episode is tried again
STOP_SECONDS = 30.0  # longest wait for everything to be cancelled


class TaskStream(Protocol):
  def __getitem__(self, serial: int) -> Task: ...


class TooManyFailures(RunFailed):
  """So many attempts failed in a row that the infrastructure, not a task, must be broken."""


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
  """A snapshot for a progress line."""

  running: int
  retried: dict[str, int]  # failed attempts that were tried again, by reason
  quarantined: dict[str, str]  # task id → reason
  slowest: str  # the oldest running episode, in words


@dataclasses.dataclass
class _Run:
  task: Task
  sample: int
  progress: Progress
  handle: asyncio.Task[Episode | str] | None = None
  cancelled: str = ""  # why it was given up
  attempt: int = 0


class Workers:
  """Keeps up to ``rollout.max_running`` episodes going while the queue admits them.

  Use as a context manager; leaving it cancels what runs and frees its sessions and environments.
  If the thread dies, ``queue.get`` raises WorkersDied from the exception.

  Args:
    config: reads ``seed``, ``group_size``, ``env`` and ``rollout``.
    client: where to sample.
    stream: ``stream[serial]`` is a task, endless.
    make_env: a new environment for each attempt.
    chat: messages ↔ tokens.
    queue: admits episodes and takes them.
    on_version: the version being trained now; with ``rollout.stale = "drop"`` a running episode
      whose oldest token can no longer be in time is cancelled, and its group with it.
    resume: what ``frozen`` gave in the run that is continued; ``pending`` serials come first.  The
      queue takes the rest (``TrajectoryQueue.restore``).
  """

  def __init__(
    self,
    config: Config,
    client: Client,
    stream: TaskStream,
    make_env: Callable[[], Env],
    chat: Chat,
    queue: TrajectoryQueue,
    on_version: Callable[[], Version],
    *,
    resume: Mapping[str, Any] | None = None,
  ) -> None:
    if config.group_size > config.rollout.max_running:
      raise ValueError(
        f"group_size = {config.group_size} exceeds rollout.max_running = "
        f"{config.rollout.max_running}: a group starts at once; raise rollout.max_running"
      )
    if queue.group_size != config.group_size:
      raise ValueError(
        f"the queue has group_size = {queue.group_size}, the config {config.group_size}"
      )
    self._config, self._client, self._stream = config, client, stream
    self._make_env, self._chat, self._queue, self._on_version = make_env, chat, queue, on_version
    self._limits = EpisodeLimits.from_config(config.env, config.rollout)
    rollout = config.rollout
    self._sampling = Sampling(1, rollout.temperature, rollout.top_k, rollout.top_p)
    self._max_failures = rollout.attempts * max(8, 2 * rollout.max_running)
    # Guards what other threads read.  Nothing that takes another lock is called under it.
    self._lock = threading.Lock()
    self._runs: dict[tuple[int, int], _Run] = {}
    self._retried: collections.Counter[str] = collections.Counter()
    resume = resume or {}
    self._quarantined: dict[str, str] = dict(resume.get("quarantined", {}))
    self._next = int(resume.get("next_serial", 0))
    self._again = collections.deque(int(s) for s in resume.get("pending", ()))
    self._claimed: int | None = None  # taken from the stream, and none of its episodes started yet
    self._lost: set[int] = set()  # dropped, to be sampled again when nothing of them runs any more
    # Tries that a task has used up before it was dropped or the run was resumed.
    self._tried = {int(serial): int(n) for serial, n in resume.get("tried", {}).items()}
    self._failures_in_row = 0
    self._skipped_in_row = 0
    self._broken: BaseException | None = None
    self._ticked = time.monotonic()
    self._loop: asyncio.AbstractEventLoop | None = None
    self._wake: asyncio.Event | None = None
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._work, name="rollout-workers", daemon=True)

  def __enter__(self) -> "Workers":
    self._queue.report_with(self.describe)
    self._queue.listen(self._poke)
    self._thread.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._stopping.set()
    self._poke()
    self._thread.join(STOP_SECONDS)
    if self._thread.is_alive():
      log.error("the rollout workers did not stop within %g s: %s", STOP_SECONDS, self.describe())

  def status(self) -> WorkerStatus:
    with self._lock:
      slowest = min((r.progress for r in self._runs.values()), key=_age, default=None)
      return WorkerStatus(
        running=len(self._runs),
        retried=dict(self._retried),
        quarantined=dict(self._quarantined),
        slowest="" if slowest is None else str(slowest),
      )

  def describe(self) -> str:
    """What runs, in one sentence: for stalls and for progress lines."""
    status = self.status()
    parts = [f"{status.running} episodes run"]
    if status.slowest:
      parts.append(f"the oldest is {status.slowest}")
    if (silent := time.monotonic() - self._ticked) > 4 * TICK_SECONDS:
      parts.append(f"the event loop has been blocked for {silent:.0f} s")
    if status.retried:
      parts.append(f"retried {status.retried}")
    if status.quarantined:
      parts.append(f"quarantined {_first(status.quarantined)}")
    return "; ".join(parts)

  @contextlib.contextmanager
  def frozen(self) -> Iterator[tuple[dict[str, Any], list[Episode], dict[str, Any]]]:
    """While entered nothing starts or finishes: what a resumed run needs so that no task is skipped
    or repeated.

    Take it after ``queue.release()``.  Yields what ``resume`` takes, the finished episodes that wait
    (for ``queue.restore``), and the queue's counts.  Tasks whose episodes run, or were dropped, are
    ``pending`` and start first, under the same serials.
    """
    with self._queue.frozen() as (ready, again, over), self._lock:
      pending = {serial for serial, _ in self._runs} | set(self._again) | self._lost | again
      pending |= set() if self._claimed is None else {self._claimed}
      pending -= {episode.task_serial for episode in ready}  # on its way from one to the other
      tried = {s: n for s, n in self._tried.items() if s in pending}
      for (serial, _), run in self._runs.items():
        if serial in pending and run.attempt:
          tried[serial] = max(tried.get(serial, 0), run.attempt)
      # An engine that was away is no fault of the tasks: a resumed run tries them again.
      kept = {t: r for t, r in self._quarantined.items() if not r.startswith(ENGINE)}
      state = {
        "next_serial": self._next,
        "pending": sorted(pending),
        "tried": {str(serial): n for serial, n in tried.items()},
        "quarantined": kept,
      }
      yield state, ready, over

  # --- On the worker thread ---

  def _work(self) -> None:
    try:
      asyncio.run(self._main())
    except BaseException as error:
      self._queue.died(error)
      raise

  def _poke(self) -> None:
    loop, wake = self._loop, self._wake
    if loop is not None and wake is not None:
      with contextlib.suppress(RuntimeError):  # the loop closed between the check and the call
        loop.call_soon_threadsafe(wake.set)

  async def _main(self) -> None:
    self._wake = asyncio.Event()
    self._loop = asyncio.get_running_loop()
    # The queue hears of it first: cancelling may have to wait for code that ignores it.
    try:
      await self._serve(self._wake)
    except BaseException as error:
      if not isinstance(error, RunFailed):  # a defect: where it is matters
        log.exception("the rollout workers died")
      self._queue.died(error)
    else:
      self._queue.died("the rollout workers were stopped")
    finally:
      await self._cancel_all()

  async def _serve(self, wake: asyncio.Event) -> None:
    while not self._stopping.is_set():
      wake.clear()
      self._ticked = time.monotonic()
      if self._broken is not None:
        raise self._broken
      self._cancel_hopeless()
      self._take_back_lost()
      self._start_admitted()
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wake.wait(), TICK_SECONDS)

  def _start_admitted(self) -> None:
    size = self._config.group_size
    while len(self._runs) + size <= self._config.rollout.max_running and self._queue.admit(size):
      task = self._next_task()
      for sample in range(size):
        run = _Run(task, sample, Progress(f"{task.serial}.{sample}", task.id))
        with self._lock:
          self._runs[task.serial, sample] = run
        name = f"episode {task.serial}.{sample}"
        run.handle = asyncio.create_task(self._attempts(run), name=name)
        run.handle.add_done_callback(functools.partial(self._settle, run))
      with self._lock:
        self._claimed = None

  def _take_back_lost(self) -> None:
    """Tasks whose episodes were dropped are sampled again first, while they have tries left."""
    lost = self._queue.take_lost_serials()
    with self._lock:
      self._lost |= lost
      running = {serial for serial, _ in self._runs}
      for serial in sorted(self._lost - running):
        self._lost.discard(serial)
        self._tried[serial] = tries = self._tried.get(serial, 0) + 1
        if tries < self._config.rollout.attempts:
          self._again.append(serial)
        else:
          log.warning("task serial %d was dropped %d times and is given up", serial, tries)

  def _next_task(self) -> Task:
    while True:
      with self._lock:
        if self._again:
          serial = self._again.popleft()
        else:
          serial, self._next = self._next, self._next + 1
        self._claimed = serial
      task = dataclasses.replace(self._stream[serial], serial=serial)
      if task.id not in self._quarantined:
        self._skipped_in_row = 0
        return task
      self._skipped_in_row += 1
      # k quarantined tasks can follow each other at most 2k times, across the end of an epoch.
      if self._skipped_in_row > 2 * len(self._quarantined):
        raise TooManyFailures(f"every task is quarantined: {_first(self._quarantined)}")

  def _settle(self, run: _Run, handle: asyncio.Task[Episode | str]) -> None:
    """Takes one episode out of the running ones and to its place in the accounts."""
    if not handle.cancelled() and (defect := handle.exception()) is not None:
      self._broken, run.cancelled = defect, "defect"
    try:
      if run.cancelled or handle.cancelled():
        wasted = [run.progress.action_tokens]
        with self._lock:
          self._lost.add(run.task.serial)
        self._queue.drop(1, run.cancelled or "stopped", wasted, run.task.serial)
      elif isinstance(outcome := handle.result(), Episode):
        self._queue.put(outcome)
      else:
        self._give_up(run, outcome)
    except Exception as error:  # the accounts do not add up: a defect that must end the run
      self._broken = error
    with self._lock:
      del self._runs[run.task.serial, run.sample]
    self._poke()

  async def _attempts(self, run: _Run) -> Episode | str:
    """The finished episode, or the reason of its last failure."""
    reason = ""
    first = self._tried.get(run.task.serial, 0)
    for attempt in range(first, max(self._config.rollout.attempts, first + 1)):
      run.attempt = attempt
      if attempt > first:
        with self._lock:
          self._retried[reason] += 1
        run.progress.mark(f"waiting to try again after {reason}")
        await asyncio.sleep(min(FIRST_BACKOFF * 2 ** (attempt - first - 1), LONGEST_BACKOFF))
      try:
        episode = await self._attempt(run, attempt)
      except Exception as error:
        reason = _reason(error)
        self._note_failure(run, attempt, error)
        # No attempt can change a refusal, and another copy of the task may have used them up.
        if isinstance(error, TaskRefused) or run.task.id in self._quarantined:
          break
      else:
        self._failures_in_row = 0
        return episode
    return reason

  async def _attempt(self, run: _Run, attempt: int) -> Episode:
    task = run.task
    name = f"{task.serial}.{run.sample}.{attempt}"
    run.progress = Progress(name, task.id)
    return await run_episode(
      self._make_env(),
      task,
      self._client,
      self._chat,
      self._limits,
      sampling=self._sampling,
      key=sampling_key(self._config.seed, task.serial, run.sample, attempt),
      episode_id=name,
      sample=run.sample,
      attempt=attempt,
      group=task.serial,
      progress=run.progress,
    )

  def _note_failure(self, run: _Run, attempt: int, error: Exception) -> None:
    self._failures_in_row += 1
    expected = isinstance(error, EnvFailure | EngineFailure | EpisodeStalled | TaskRefused)
    log.warning(
      "attempt %d of %d failed (%s: %s): %s",
      attempt + 1,
      self._config.rollout.attempts,
      type(error).__name__,
      error,
      run.progress,
      exc_info=None if expected else error,
    )
    if self._failures_in_row >= self._max_failures and self._broken is None:
      self._broken = TooManyFailures(
        f"{self._failures_in_row} attempts failed in a row, the last with {type(error).__name__}: "
        f"{error} ({run.progress})"
      )
      self._broken.__cause__ = error

  def _give_up(self, run: _Run, reason: str) -> None:
    """The task is quarantined; what else its group did cannot be used without this member."""
    log.error("task %s is quarantined after %s: %s", run.task.id, reason, run.progress)
    with self._lock:
      self._quarantined[run.task.id] = reason
    self._queue.abandon(run.task.serial, INCOMPLETE)
    self._queue.fail(1, reason, run.task.serial)
    self._cancel_groups({run.task.serial})

  def _cancel_groups(self, serials: Collection[int]) -> None:
    for run in list(self._runs.values()):
      if run.task.serial in serials:
        self._cancel(run, INCOMPLETE)

  def _cancel(self, run: _Run, reason: str) -> None:
    if not run.cancelled and run.handle is not None:
      run.cancelled = reason
      run.handle.cancel()

  def _cancel_hopeless(self) -> None:
    """Gives up running episodes that would be dropped at the pop, before they cost more.

    Each takes its group along: finished members would wait for it for ever and hold their room.
    """
    if self._config.rollout.stale == "drop":
      oldest = self._on_version().step - self._config.rollout.max_staleness
      for run in list(self._runs.values()):
        version = run.progress.oldest_version
        if not run.cancelled and version is not None and version < oldest:
          self._queue.abandon(run.task.serial, INCOMPLETE)
          self._cancel(run, "stale")
    if lost := self._queue.lost_groups():
      self._cancel_groups(lost)

  async def _cancel_all(self) -> None:
    handles = [run.handle for run in self._runs.values() if run.handle is not None]
    for run in list(self._runs.values()):
      self._cancel(run, "stopped")
    if handles:
      await asyncio.wait(handles, timeout=STOP_SECONDS)


def _reason(error: Exception) -> str:
  name = type(error).__name__
  if isinstance(error, EngineFailure) and name != ENGINE:
    return f"{ENGINE}.{name}"
  return name


def _age(progress: Progress) -> float:
  return progress.started


def _first(quarantined: Mapping[str, str], most: int = 5) -> str:
  shown = ", ".join(f"{task} ({reason})" for task, reason in list(quarantined.items())[:most])
  more = len(quarantined) - most
  return f"{shown} and {more} more" if more > 0 else shown
