"""What a run keeps of each step: its metrics, records, and checkpoints."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from sao_jax.data.archive import episodes_to_bytes
from sao_jax.rollout.queue import TrajectoryQueue
from sao_jax.rollout.service import RolloutService
from sao_jax.rollout.workers import Workers
from sao_jax.train.baselines import RunningMeans
from sao_jax.train.checkpoint import Checkpoints
from sao_jax.train.metrics import Writer
from sao_jax.train.record import Recorder
from sao_jax.train.updates import LoopSteps
from sao_jax.types import Batch, Episode


class Keeper:
  """Writes what is known after a step, in the order in which a kill may come.

  Args:
    steps: the states that are saved.
    service: the engine, whose counters and busy spans go along.
    queue: whose accounts do.
    workers: whose running episodes are saved as serials.
    baselines: whose windows are saved.
    writer: of metrics.jsonl.
    record: of the other files.
    checkpoints: None saves nothing.
  """

  def __init__(
    self,
    steps: LoopSteps,
    service: RolloutService,
    queue: TrajectoryQueue,
    workers: Workers,
    baselines: RunningMeans,
    writer: Writer,
    record: Recorder,
    checkpoints: Checkpoints | None,
  ) -> None:
    self._steps, self._service, self._queue, self._workers = steps, service, queue, workers
    self._baselines = baselines
    self._writer, self._record, self._checkpoints = writer, record, checkpoints
    self.clock = Clock(record, service.metrics())

  def step(
    self, step: int, episodes: Sequence[Episode], batch: Batch, metrics: dict[str, Any]
  ) -> None:
    """Step ``step`` is done and its weights are published."""
    host = self._queue.metrics()
    host |= self.clock.metrics(metrics["batch/trained_tokens"], self._service.metrics())
    host |= {f"accounting/{name}": n for name, n in self._queue.counters().items()}
    self._writer.hold(step, metrics | host)
    self._record.episodes(step, episodes)
    if self._record.wants_trajectories(step):
      self._record.trajectories(step, episodes, batch, self._steps.tokens)

  def evaluate(self, step: int, evaluate: Callable[[int], dict[str, float]]) -> None:
    """The trainer waits; the numbers go on the step's line."""
    self._writer.hold(step, evaluate(step))
    self.clock.mark("evaluate")

  def end_step(self, step: int) -> None:
    """Saves if a checkpoint is due, and closes the step's line of the timeline."""
    if self._checkpoints is not None and self._checkpoints.due(step):
      self.save(step)
    self._record.step(step, self._service.engine.take_spans())

  def finish(self, step: int, max_bad_steps: int) -> None:
    """After the last step, or the last before a stop: it is judged and on the disk on return.

    Its line stays open: the final evaluation goes on it.
    """
    self._steps.raise_if_stuck(self._steps.verdict | {"step": step}, max_bad_steps)
    self.save(step)
    if self._checkpoints is not None:
      self._checkpoints.require(step)

  def save(self, step: int) -> None:
    """Starts to write a checkpoint; the lines of its steps are on the disk before it is."""
    if self._checkpoints is None or step in self._checkpoints.steps():
      return
    self._writer.sync()
    self._record.sync()
    with self._workers.frozen() as (pending, ready, over):
      meta = {
        "identity": self._steps.identity,
        "incarnation": self._service.version().incarnation,
        "workers": pending,
        "accounting": over,
        "baselines": self._baselines.state(),
      }
      waiting = episodes_to_bytes(ready)
    self._checkpoints.save(step, self._steps.states(), meta, waiting)
    self.clock.mark("checkpoint")


class Clock:
  """Where the trainer's wall time goes: waiting for episodes, training, evaluating, saving."""

  def __init__(self, record: Recorder, engine: dict[str, float]) -> None:
    self.record, self.engine = record, engine
    self.spent = {"wait": 0.0, "train": 0.0}
    self.last = time.monotonic()

  def mark(self, what: str) -> None:
    """What was done since the last mark."""
    now = self.record.span(what, self.last)
    self.spent[what] = now - self.last
    self.last = now

  def metrics(self, tokens: float, engine: dict[str, float]) -> dict[str, float]:
    """Of the step that ends now; ``engine`` holds the engine's counters since it started.

    Evaluations and saves come after it: they are no part of a step's time.
    """
    total = max(self.spent["wait"] + self.spent["train"], 1e-9)
    grown = {name: value - self.engine.get(name, 0.0) for name, value in engine.items()}
    self.engine = engine
    return {
      "time/step": total,
      "time/wait": self.spent["wait"],
      "time/trainer_busy": self.spent["train"] / total,
      "time/engine_busy": min(grown["generate_seconds"] / total, 1.0),
      "throughput/tokens_per_second": tokens / total,
      "engine/slot_use": grown["slot_steps"] / max(grown["steps"] * engine["slots"], 1.0),
      "engine/steps": grown["steps"],
      "engine/prefilled_tokens": grown["prefilled_tokens"],
    }
