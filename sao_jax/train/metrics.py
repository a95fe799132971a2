"""Metrics of a run: one JSON line per step, TensorBoard if asked, a table and a figure at the end.

Names are slash-separated.  The figure, the table and the progress bar read

======================================  ============================================================
``episode/reward``                      mean reward of the batch's episodes
``episode/actions``                     sampled tokens per episode
``episode/calls``                       tool calls per episode
``eval/sampled``, ``eval/greedy``       held-out reward at the training temperature, and greedy
``staleness/mean``, ``/trained_max``    of the batch's action tokens; the largest that was trained
``staleness/histogram``                 list: trained tokens of staleness 0, 1, 2, …
``staleness/mixed_versions``            share of trajectories with tokens of two or more versions
``staleness/masked_share``              action tokens that were too old to train
``loss/masked_low``, ``/masked_high``   trained tokens below and above the band
``ratio/q01_fresh`` … ``/q99_stale``    quantiles of π/π_rollout at staleness 0, and above
``critic/explained_variance``           of the critic before its updates on the batch
``throughput/tokens_per_second``        trained action tokens per second of wall time
``time/trainer_busy``, ``engine_busy``  shares of wall time
``accounting/*``                        where every started episode is
======================================  ============================================================

and do without those that a run does not write.
"""

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from sao_jax.config import ConfigError
from sao_jax.train import progress
from sao_jax.train.curves import draw
from sao_jax.train.jsonlines import Row, encode, read_rows, read_steps, write_whole


class Writer:
  """Writes the metrics of a run; a context manager.

  Metrics of one step may come in several calls (``hold``); the step's line is written whole when a
  later step begins, so that reading device arrays never waits for the step just dispatched.  The
  last line that was written can still be added to.

  Args:
    run_dir: gets ``metrics.jsonl`` and ``curves.png``.  A ``metrics.jsonl`` that is there is kept
      as ``metrics.previous.jsonl``, or continued with ``resume_step``.
    tensorboard: write event files too (extra ``tensorboard``).
    resume_step: the run goes on after this step: lines beyond it are taken back, so that every step
      has one line.
    console: where to print; default: standard output.

  Raises:
    ConfigError: ``tensorboard`` without tensorboardX.
  """

  def __init__(
    self,
    run_dir: str | os.PathLike[str],
    *,
    tensorboard: bool = False,
    resume_step: int | None = None,
    console: Console | None = None,
  ):
    self.run_dir = Path(run_dir)
    self.run_dir.mkdir(parents=True, exist_ok=True)
    self.console = console or Console()
    self.last: Row = {}  # the last step that was read; a long run's other rows are in the file only
    self._held: tuple[int, dict[str, Any]] | None = None
    self._started = time.monotonic()
    path = self.run_dir / "metrics.jsonl"
    if resume_step is not None:
      self._take_back(path, resume_step)
    elif path.exists():
      path.replace(self.run_dir / "metrics.previous.jsonl")
    self._tensorboard = _summary_writer(self.run_dir) if tensorboard else None
    self._file = path.open("r+b" if path.exists() else "w+b")
    self._file.seek(0, os.SEEK_END)
    self._last_line, self._reopen = len(encode(self.last).encode()) if self.last else 0, False

  def elapsed(self) -> float:
    """Seconds since the run began, without the time between a kill and its resumption."""
    return time.monotonic() - self._started

  def __enter__(self) -> "Writer":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def hold(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Adds metrics (numbers, arrays, lists of numbers) to a step's line.

    Earlier steps are read from the device and written now.

    Raises:
      ValueError: the step's line is already written.
    """
    if self._held is not None and step > self._held[0]:
      self.flush()
    if self._held is None:
      self._held = step, self._reopened(step)
    if step < self._held[0]:
      raise ValueError(f"metrics for step {step}, but step {self._held[0]} has begun")
    self._held[1].update(metrics)

  write = hold

  def _reopened(self, step: int) -> dict[str, Any]:
    """What the last line holds if it is this step's: the next flush writes over it."""
    written = self.last.get("step", -1)
    if step < written:
      raise ValueError(f"metrics for step {step}, but step {written} is already written")
    if step > written:
      return {}
    self._reopen = True
    return {n: value for n, value in self.last.items() if n not in ("step", "time/elapsed")}

  def flush(self) -> None:
    """Reads and writes the held step."""
    if self._held is None:
      return
    (step, metrics), self._held = self._held, None
    read = jax.device_get(metrics)
    host = {name: _plain(read[name]) for name in metrics}  # in the order in which they came
    row = {"step": step, "time/elapsed": round(self.elapsed(), 3), **host}
    self.last = row
    self._put(encode(row).encode())
    if self._tensorboard is not None:
      for name, value in host.items():
        if isinstance(value, int | float):
          self._tensorboard.add_scalar(name, value, step)

  def _put(self, line: bytes) -> None:
    """Appends a line, or puts it in the place of the last one: no moment leaves the step without."""
    if self._reopen:
      self._file.seek(-self._last_line, os.SEEK_END)
    self._file.write(line)
    self._file.flush()
    self._file.truncate()
    self._last_line, self._reopen = len(line), False

  def sync(self) -> None:
    """Flushes, and on return the lines survive a power cut."""
    self.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Writes what is held and closes the files; idempotent."""
    if self._file.closed:
      return
    self.flush()
    self._file.close()
    if self._tensorboard is not None:
      self._tensorboard.close()

  def print(self, text: str) -> None:
    self.console.print(text, highlight=False, markup=False)

  def phase(self, text: str) -> contextlib.AbstractContextManager[None]:
    """``with writer.phase("compiling the engine"):`` — announced, with a heartbeat, timed."""
    return progress.phase(text, self.console)

  def progress(self, label: str, total: int) -> progress.ProgressBar:
    return progress.ProgressBar(label, total, self.console)

  def finish(self, results: Mapping[str, float | int]) -> Path:
    """Prints the tables of results, draws the curves; returns the path of the figure.

    ``results`` has ``<name>/before``, ``/after``, ``/gain``, ``/gain_low``, ``/gain_high`` for each
    evaluation, and any other number.
    """
    self.flush()
    history = read_rows(self.run_dir / "metrics.jsonl")
    self.console.print(results_table(results))
    self.console.print(run_table(history))
    path = self.run_dir / "curves.png"
    draw(history, path, title=self.run_dir.name)
    # Whole, on a line of its own: a wrapped path cannot be clicked or copied.
    self.console.print(f"metrics: {self.run_dir / 'metrics.jsonl'}", soft_wrap=True)
    self.console.print(f"curves:  {path}", soft_wrap=True)
    return path

  def _take_back(self, path: Path, resume_step: int) -> None:
    kept: list[Row] = []
    if path.exists():
      kept = [row for row in read_steps(path) if row["step"] <= resume_step]
      if kept:
        self.last = kept[-1]
      if (end := self.last.get("step", 0)) < resume_step:
        self.print(
          f"{path} ends at step {end}, the checkpoint is of step {resume_step}: the lines between are lost"
        )
      self._started -= self.last.get("time/elapsed", 0.0)
    write_whole(path, "".join(map(encode, kept)))


def _plain(value: Any) -> Any:
  """A JSON value; what is not finite becomes null, which readers take for missing."""
  if isinstance(value, str | bool | None):
    return value
  array = np.asarray(value)
  if array.ndim:
    return [_plain(item) for item in array.tolist()]
  item = array.item()
  return item if not isinstance(item, float) or math.isfinite(item) else None


def _summary_writer(run_dir: Path) -> Any:
  try:
    from tensorboardX import SummaryWriter
  except ImportError as error:
    raise ConfigError(
      "tensorboard = True needs the package tensorboardX: install the extra, sao-jax[tensorboard], "
      "or set tensorboard = False (metrics.jsonl is always written)"
    ) from error
  return SummaryWriter(str(run_dir / "tensorboard"))


def results_table(results: Mapping[str, float | int]) -> Table:
  """Held-out reward before and after, with the gain and its 95 % interval."""
  problems = results.get("problems")
  count = f" on {problems:.0f} problems" if problems else ""
  table = Table(title=f"Held-out reward{count}", title_justify="left")
  table.add_column("decoding")
  for column in ("before", "after", "gain", "95 % interval"):
    table.add_column(column, justify="right")
  for name in [key.removesuffix("/before") for key in results if key.endswith("/before")]:
    low, high = results.get(f"{name}/gain_low"), results.get(f"{name}/gain_high")
    table.add_row(
      name,
      f"{results[f'{name}/before']:.3f}",
      f"{results[f'{name}/after']:.3f}",
      f"{results[f'{name}/gain']:+.3f}",
      f"{low:+.3f} … {high:+.3f}" if low is not None and high is not None else "",
    )
  return table


def run_table(history: list[Row]) -> Table:
  """What the run did, over all its steps."""
  table = Table(title="The run", title_justify="left", show_header=False)
  table.add_column()
  table.add_column(justify="right")

  def column(name: str) -> list[float]:
    return [float(row[name]) for row in history if row.get(name) is not None]

  def add(label: str, name: str, form: str, reduce: Any = np.mean) -> None:
    if values := column(name):
      table.add_row(label, form.format(float(reduce(values))))

  add("training steps", "step", "{:.0f}", max)
  add("wall time of the run, s", "time/elapsed", "{:.0f}", max)
  if rewards := column("episode/reward"):
    n = max(1, len(rewards) // 10)
    first, last = np.mean(rewards[:n]), np.mean(rewards[-n:])
    table.add_row(f"training reward, first and last {n} steps", f"{first:.3f} → {last:.3f}")
  add("staleness of action tokens, mean", "staleness/mean", "{:.2f}")
  add("staleness of trained tokens, largest", "staleness/trained_max", "{:.0f}", max)
  add("trajectories of two or more versions", "staleness/mixed_versions", "{:.1%}")
  add("tokens too old to train", "staleness/masked_share", "{:.2%}")
  add("trained tokens outside the band", "loss/masked", "{:.2%}")
  if explained := column("critic/explained_variance"):
    table.add_row("explained variance, first → last", f"{explained[0]:.2f} → {explained[-1]:.2f}")
  add("action tokens per second", "throughput/tokens_per_second", "{:,.0f}")
  add("trainer busy", "time/trainer_busy", "{:.0%}")
  add("engine busy", "time/engine_busy", "{:.0%}")
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  table.add_row("peak memory, GiB", f"{peak / (2**30 if sys.platform == 'darwin' else 2**20):.1f}")
  counts = {key.removeprefix("accounting/"): value for key, value in _last(history, "accounting/")}
  for name in ("started", "trained", "dropped", "failed"):
    if name in counts:
      table.add_row(f"episodes {name}", f"{counts[name]:,.0f}")
  return table


def _last(history: list[Row], prefix: str) -> list[tuple[str, Any]]:
  for row in reversed(history):
    if found := [(k, v) for k, v in row.items() if k.startswith(prefix) and v is not None]:
      return found
  return []
