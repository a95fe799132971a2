"""Threads that episodes share, and deadlines that blame nobody for waiting in line.

Every await of an episode has a deadline, or a hung service would never be noticed.  Time in line
for a shared worker says nothing about the one who waits: others were served meanwhile.  So while a
job waits, its caller's deadline follows the whole pool's signs of life, and once a worker has taken
the job, the job's own::

    stalled  ⟺  now - max(start of the await, last sign of life) >= seconds

A pool whose workers all hang gives no sign, so everyone in line notices after ``seconds``.  The
line is first in, first out, so a wait ends.  Awaits that use no pool are bounded as ever.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_watcher: contextvars.ContextVar["Patience | None"] = contextvars.ContextVar(
  "_watcher", default=None
)


class Patience:
  """What the deadline of one await goes by.

  ``queued`` is how many seconds of the await passed in line.
  """

  def __init__(self) -> None:
    self._since = time.monotonic()
    self._signs: list[Callable[[], float]] = []
    self.queued = 0.0

  def last(self) -> float:
    """When (``time.monotonic``) the await began or its work last gave a sign of life."""
    return max([self._since, *(sign() for sign in self._signs)])

  @contextlib.contextmanager
  def watching(self) -> Iterator[None]:
    """Tasks created in this context report here."""
    token = _watcher.set(self)
    try:
      yield
    finally:
      _watcher.reset(token)

  @contextlib.contextmanager
  def follow(self, job: "Job") -> Iterator[None]:
    self._signs.append(job.last)
    try:
      yield
    finally:
      self._signs.remove(job.last)
      self._since = time.monotonic()  # what comes after the job has the whole time again
      self.queued += job.queued()


class Job(Generic[T]):
  """Work that was handed to a pool."""

  def __init__(self, pool: "WorkerPool", work: Callable[[Callable[[], None]], T]) -> None:
    self._pool, self._work = pool, work
    self._joined = time.monotonic()
    self._taken: float | None = None
    self._heard = 0.0
    self._future = pool.executor.submit(self._run)

  async def result(self) -> T:
    """Waits for it, with the patience of the await that this is a part of; cancels with it."""
    patience = _watcher.get()
    with patience.follow(self) if patience is not None else contextlib.nullcontext():
      return await asyncio.wrap_future(self._future)

  def last(self) -> float:
    return self._pool.heard if self._taken is None else self._heard

  def queued(self) -> float:
    """Seconds until a worker took it, or until now."""
    return (time.monotonic() if self._taken is None else self._taken) - self._joined

  def _run(self) -> T:
    # No sign of the pool's life: a pool that takes jobs and finishes none is a hung one.
    self._heard = self._taken = time.monotonic()
    result = self._work(self._beat)
    self._beat()
    return result

  def _beat(self) -> None:
    self._heard = self._pool.heard = time.monotonic()


class WorkerPool:
  """``workers`` threads with one line before them.

  Work gets a function to call, from its thread, as often as it can vouch that it goes on and will
  end in bounded time.  Its end is a sign of life too, unless it raises: a pool of which nothing
  but failures comes is broken.
  """

  def __init__(self, workers: int, name: str) -> None:
    self.executor = concurrent.futures.ThreadPoolExecutor(workers, name)
    self.heard = 0.0  # when work last gave a sign of life

  def submit(self, work: Callable[[Callable[[], None]], T]) -> Job[T]:
    return Job(self, work)

  def close(self) -> None:
    """Cancels who waits in line and waits for the rest."""
    self.executor.shutdown(wait=True, cancel_futures=True)
