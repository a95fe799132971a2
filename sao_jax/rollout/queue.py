"""The queue between rollouts and training: admission by the staleness bound, FIFO, accounting.

A group of n episodes (n = 1 for SAO) starts only while ::

    queued + in_training + running + n <= (max_staleness + 1) · batch_size

which bounds how many versions can pass while an episode waits its turn; without cumulative counters
nothing inflates when a run is resumed.  Capacity of trained episodes comes back with ``release``,
after the new weights were published and acknowledged, so that no episode starts under weights that
are about to be replaced.  At every moment ::

    started = trained + dropped + failed + queued + running + in_training
"""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.outcome import RunFailed
from sao_jax.types import Episode, Version

log = logging.getLogger(__name__)

STOP_POLL_SECONDS = 0.2  # a signal handler cannot notify a lock that its own thread may hold
INCOMPLETE = "group_incomplete"  # why an episode is dropped whose group lost another member


class QueueStalled(RunFailed):
  """Nothing finished for too long; the message names counts, reasons and the oldest episode."""


class WorkersDied(RunFailed):
  """No more episodes will come: the workers stopped, or died of the exception that caused this."""


class TrajectoryQueue:
  """Finished episodes on their way to training.  Every method may be called from any thread.

  Args:
    batch_size: episodes of one training step.
    max_staleness: versions a token may lag behind the version being trained; 0 is on-policy.
    stale: "mask" hands out episodes with older tokens (``pack`` masks those tokens), "drop" drops
      such episodes whole.
    group_size: rollouts of one prompt; a group is handed out when all of it has finished.
    min_staleness: a batch is handed out only when this many more wait behind it, so that its
      episodes were started at least as many versions ago (at step k of a new run, min(k, that)).
  """

  def __init__(
    self,
    batch_size: int,
    max_staleness: int,
    stale: str = "mask",
    group_size: int = 1,
    min_staleness: int = 0,
  ) -> None:
    if batch_size < 1 or group_size < 1 or batch_size % group_size:
      raise ValueError(f"batch_size = {batch_size} is not a multiple of group_size = {group_size}")
    if max_staleness < 0:
      raise ValueError(f"max_staleness = {max_staleness}: must be 0 or more")
    if not 0 <= min_staleness <= max_staleness:
      raise ValueError(
        f"min_staleness = {min_staleness} with max_staleness = {max_staleness}: no batch would be handed "
        "out; choose min_staleness from 0 to max_staleness"
      )
    if stale not in ("mask", "drop"):
      raise ValueError(f"stale = {stale!r}: choose one of mask, drop")
    self.batch_size, self.group_size = batch_size, group_size
    self.max_staleness, self.stale, self._min_staleness = max_staleness, stale, min_staleness
    self._changed = threading.Condition()
    self._ready: collections.deque[list[Episode]] = collections.deque()  # whole groups, FIFO
    self._partial: dict[int, list[Episode]] = {}  # groups of which some members still run
    self._lost_groups: set[int] = set()  # will never be complete, and members still run
    self._gone: collections.Counter[int] = collections.Counter()  # members that no longer run
    self._training: list[Episode] = []
    self._started = self._trained = self._running = 0
    self._dropped: collections.Counter[str] = collections.Counter()
    self._failed: collections.Counter[str] = collections.Counter()
    self._listeners: list[Callable[[], None]] = []
    self._reporter: Callable[[], str] = lambda: "no workers are attached"
    self._death: BaseException | str | None = None
    self._last_put = 0.0
    self._lost: list[tuple[int, int]] = []  # (action tokens, of them lost), dropped since last get
    self._lost_serials: set[int] = set()  # of dropped episodes, since the last look: sample again
    self._metrics: dict[str, float] = {}

  # --- The workers' side ---

  def admit(self, n: int = 1) -> bool:
    """Starts n episodes if the staleness bound allows; they count as running from here on."""
    with self._changed:
      if self._death is not None:
        return False
      load = self._queued() + len(self._training) + self._running
      if load + n > (self.max_staleness + 1) * self.batch_size:
        return False
      self._started += n
      self._running += n
      return True

  def put(self, episode: Episode) -> None:
    """A running episode finished.  It is dropped if its group was abandoned meanwhile."""
    with self._changed:
      lost = episode.group in self._lost_groups
      self._leave_running(1, episode.group)
      if lost:
        self._drop_finished([episode], INCOMPLETE)
      else:
        group = self._partial.setdefault(episode.group, [])
        group.append(episode)
        if len(group) == self.group_size:
          self._ready.append(self._partial.pop(episode.group))
      self._last_put = time.monotonic()
      self._changed.notify_all()
    if lost:
      self._notify()

  def drop(
    self, n: int, reason: str, lengths: Sequence[int] = (), group: int | None = None
  ) -> None:
    """n running episodes were given up; ``lengths`` are the action tokens that were wasted.

    Without them their ``group`` can never be complete: ``abandon`` it first.
    """
    with self._changed:
      self._leave_running(n, group)
      self._dropped[reason] += n
      self._lost += [(length, length) for length in lengths]
      self._changed.notify_all()
    self._notify()

  def fail(self, n: int, reason: str, group: int | None = None) -> None:
    """n running episodes failed for good: infrastructure, never a reward of 0."""
    with self._changed:
      self._leave_running(n, group)
      self._failed[reason] += n
      self._changed.notify_all()
    self._notify()

  def abandon(self, group: int, reason: str) -> int:
    """Drops the finished members of a group that will never be complete; returns how many.

    Members that still run are dropped when they finish, so call it before the last one leaves.
    """
    with self._changed:
      dropped = self._abandon(group, reason)
      self._changed.notify_all()
    self._notify()
    return dropped

  def lost_groups(self) -> set[int]:
    """Groups that were abandoned, here or at a pop, while members of them run."""
    with self._changed:
      return set(self._lost_groups)

  def take_lost_serials(self) -> set[int]:
    """Tasks of which finished episodes were dropped since the last call: to be sampled again."""
    with self._changed:
      lost, self._lost_serials = self._lost_serials, set()
      return lost

  def died(self, cause: BaseException | str) -> None:
    """Nothing more will come.  ``get`` raises WorkersDied from an exception at once; after a
    plain stop (a sentence) it first hands out the whole batches that are there."""
    with self._changed:
      self._death = cause
      self._changed.notify_all()

  def listen(self, callback: Callable[[], None]) -> None:
    """``callback`` runs, in any thread, whenever capacity came back."""
    self._listeners.append(callback)

  def report_with(self, reporter: Callable[[], str]) -> None:
    """``reporter`` describes what runs (oldest episode, turn, last event) for QueueStalled."""
    self._reporter = reporter

  # --- The trainer's side ---

  def get(
    self,
    batch_size: int,
    version: Version,
    timeout: float = 600.0,
    *,
    heartbeat: float = 10.0,
    on_wait: Callable[[dict[str, int]], None] | None = None,
    stop: threading.Event | None = None,
  ) -> list[Episode]:
    """Waits for a batch: the first groups that finished, sorted by (task serial, sample).

    Args:
      batch_size: a multiple of the group size.
      version: the version that will be trained on the batch.
      timeout: longest time in seconds in which no episode finishes.
      heartbeat: seconds between calls of ``on_wait`` (default: a line in the log) while waiting.
      on_wait: gets the counters.
      stop: when it is set, waiting ends with an empty list.

    Raises:
      QueueStalled: no episode finished for ``timeout`` seconds.
      WorkersDied: no episode will ever finish.
    """
    if batch_size % self.group_size:
      raise ValueError(
        f"batch_size = {batch_size} is not a multiple of group_size = {self.group_size}"
      )
    began = beat = time.monotonic()
    while True:
      with self._changed:
        swept = self._sweep(version)
        if isinstance(self._death, BaseException):
          raise WorkersDied(self._sentence(_cause(self._death))) from self._death
        batch = self._take(batch_size, version)
        if batch is None and not swept:
          if self._death is not None:
            raise WorkersDied(self._sentence(str(self._death)))
          silent = time.monotonic() - max(began, self._last_put)
          if silent >= timeout:
            break
          if stop is not None and stop.is_set():
            return []
          longest = timeout if stop is None else STOP_POLL_SECONDS
          left = min(timeout - silent, beat + heartbeat - time.monotonic(), longest)
          self._changed.wait(max(0.0, left))
      if swept:
        self._notify()
      if batch is not None:
        return batch
      if time.monotonic() - beat >= heartbeat:
        beat = time.monotonic()
        counters = self.counters()
        if on_wait is not None:
          on_wait(counters)
        else:
          log.info("waiting for %d episodes for %.0f s: %s", batch_size, beat - began, counters)
    raise QueueStalled(f"no episode finished for {timeout:g} s; {self._sentence('')}")

  def release(self) -> None:
    """The batch was trained and the new weights are published: its capacity comes back."""
    with self._changed:
      self._trained += len(self._training)
      self._training.clear()
    self._notify()

  def counters(self) -> dict[str, int]:
    """Where every started episode is; dropped and failed also by reason."""
    with self._changed:
      return {
        "started": self._started,
        "trained": self._trained,
        "dropped": sum(self._dropped.values()),
        "failed": sum(self._failed.values()),
        "queued": self._queued(),
        "running": self._running,
        "in_training": len(self._training),
        **{f"dropped/{reason}": n for reason, n in sorted(self._dropped.items())},
        **{f"failed/{reason}": n for reason, n in sorted(self._failed.items())},
      }

  def check(self) -> None:
    """Asserts that no episode was lost: the sum in the module's docstring."""
    c = self.counters()
    ends = ("trained", "dropped", "failed", "queued", "running", "in_training")
    if c["started"] != (total := sum(c[name] for name in ends)):
      raise AssertionError(f"started {c['started']} episodes, accounted for {total}: {c}")

  def metrics(self) -> dict[str, float]:
    """Of the last batch: waiting times, and what staleness cost by length quartile."""
    with self._changed:
      return dict(self._metrics)

  def serials(self) -> set[int]:
    """Task serials of episodes that are finished and not yet trained."""
    with self._changed:
      groups = [*self._ready, *self._partial.values(), self._training]
      return {episode.task_serial for group in groups for episode in group}

  # --- Checkpoints ---

  @contextlib.contextmanager
  def frozen(self) -> Iterator[tuple[list[Episode], set[int], dict[str, Any]]]:
    """While entered nothing starts, finishes or leaves.

    Yields the episodes that can be trained as they are (whole groups), the serials of the other
    finished ones, which have to be sampled again, and the counts of what is over for good.
    """
    with self._changed:
      ready = [episode for group in self._ready for episode in group]
      others = [*self._partial.values(), self._training]
      again = {episode.task_serial for group in others for episode in group} | self._lost_serials
      over = {
        "trained": self._trained,
        "dropped": dict(self._dropped),
        "failed": dict(self._failed),
      }
      yield ready, again, over

  def restore(self, episodes: Sequence[Episode], over: Mapping[str, Any], incarnation: int) -> None:
    """Goes on from what ``frozen`` gave: the episodes enter the new incarnation of the trainer."""
    with self._changed:
      if self._started:
        raise ValueError(f"{self._started} episodes have started: restore comes first")
      entered = [dataclasses.replace(e, incarnation=incarnation) for e in episodes]
      groups: dict[int, list[Episode]] = {}
      for episode in entered:
        groups.setdefault(episode.group, []).append(episode)
      self._ready.extend(groups.values())
      self._trained = int(over["trained"])
      self._dropped.update({reason: int(n) for reason, n in over["dropped"].items()})
      self._failed.update({reason: int(n) for reason, n in over["failed"].items()})
      finished = self._trained + sum(self._dropped.values()) + sum(self._failed.values())
      self._started = finished + len(entered)

  # --- Inside, under the lock ---

  def _queued(self) -> int:
    return sum(map(len, self._ready)) + sum(map(len, self._partial.values()))

  def _leave_running(self, n: int, group: int | None) -> None:
    if n > self._running:
      raise ValueError(f"{n} episodes leave, but {self._running} are running: each starts by admit")
    self._running -= n
    if group is None:
      return
    self._gone[group] += n
    if self._gone[group] >= self.group_size:  # the last one: nothing is left to remember
      del self._gone[group]
      self._lost_groups.discard(group)

  def _abandon(self, group: int, reason: str) -> int:
    self._lost_groups.add(group)
    episodes = self._partial.pop(group, [])
    self._drop_finished(episodes, reason)
    return len(episodes)

  def _drop_finished(self, episodes: Sequence[Episode], reason: str) -> None:
    if episodes:
      self._dropped[reason] += len(episodes)
      self._lost_serials |= {e.task_serial for e in episodes}
    self._lost += [(e.num_actions, e.num_actions) for e in episodes]

  def _sweep(self, version: Version) -> bool:
    """Drops what can no longer be trained; True if something was."""
    kept: collections.deque[list[Episode]] = collections.deque()
    for group in self._ready:
      if reason := self._useless(group, version):
        self._drop_finished(group, reason)
      else:
        kept.append(group)
    swept = len(kept) != len(self._ready)
    self._ready = kept
    for serial, members in list(self._partial.items()):
      if reason := self._useless(members, version):
        self._abandon(serial, reason)
        swept = True
    return swept

  def _useless(self, group: Sequence[Episode], version: Version) -> str:
    """Why none of a group can be trained any more; empty if it can."""
    if any(e.incarnation != version.incarnation for e in group):
      return "incarnation"
    if self.stale == "drop" and any(self._stale_tokens(e, version) for e in group):
      return "stale"
    return ""

  def _take(self, batch_size: int, version: Version) -> list[Episode] | None:
    groups = batch_size // self.group_size
    if len(self._ready) < groups * (1 + self._min_staleness):
      return None
    batch = [e for _ in range(groups) for e in self._ready.popleft()]
    self._training += batch
    self._metrics = self._batch_metrics(batch, version)
    self._lost = []
    return sorted(batch, key=lambda e: e.sort_key)

  def _stale_tokens(self, episode: Episode, version: Version) -> int:
    oldest = version.step - self.max_staleness
    return sum(int((t.policy_version[t.action_mask] < oldest).sum()) for t in episode.trajectories)

  def _batch_metrics(self, batch: Sequence[Episode], version: Version) -> dict[str, float]:
    now = time.monotonic()
    waits = [now - e.finished for e in batch]
    seen = [(e.num_actions, self._stale_tokens(e, version)) for e in batch] + self._lost
    lengths, lost = np.array(seen, np.float64).T
    metrics = {
      "queue/wait_mean": float(np.mean(waits)),
      "queue/wait_max": float(np.max(waits)),
      "queue/left": float(self._queued()),
      "queue/wasted_token_share": float(lost.sum() / max(lengths.sum(), 1.0)),
    }
    # Staleness hits the longest episodes first, so one mean would hide whom it silences.
    by_length = np.array_split(np.argsort(lengths, kind="stable"), 4)
    for q, members in enumerate(by_length, start=1):
      share = lost[members].sum() / max(lengths[members].sum(), 1.0)
      metrics[f"queue/wasted_token_share_q{q}"] = float(share)
    return metrics

  def _sentence(self, start: str) -> str:
    c = self.counters()
    hint = ""
    if c["in_training"]:
      hint = f"; {c['in_training']} are in training: release() gives their room back after publish"
    text = f"counts {c}; {self._reporter()}{hint}"
    return f"{start}: {text}" if start else text

  def _notify(self) -> None:
    for callback in self._listeners:
      callback()


def _cause(death: BaseException) -> str:
  """What the workers died of; an expected end says itself what happened."""
  name = "" if isinstance(death, RunFailed) else f"{type(death).__name__}: "
  return f"the rollout workers died: {name}{death}"
