"""What a person sees while a run goes on: phases with a heartbeat, and a progress bar.

On a terminal the bar redraws in place; elsewhere (a log file, CI) plain lines come, seconds apart.
Numbers may be arrays still being computed: the bar shows the previous step's, so that
showing them never holds up the device.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from rich import progress as rich_progress
from rich.console import Console

HEARTBEAT_SECONDS = 15.0
LINE_SECONDS = 5.0  # at most one plain line in this time

# Label, metric, format; a run shows those that it has.
SHOWN = (
  ("loss", "sft/loss", "{:.3f}"),
  ("reward", "episode/reward", "{:.2f}"),
  ("staleness", "staleness/mean", "{:.2f}"),
  ("masked", "loss/masked", "{:.1%}"),
  ("EV", "critic/explained_variance", "{:.2f}"),
  ("tok/s", "throughput/tokens_per_second", "{:,.0f}"),
)
# Value pretraining has no reward to show, RL has no room for its critic's loss.
SHOWN_WITHOUT_REWARD = (("value loss", "critic/loss", "{:.4f}"),)


@contextlib.contextmanager
def phase(
  text: str, console: Console | None = None, heartbeat: float = HEARTBEAT_SECONDS
) -> Iterator[None]:
  """Announces a phase, tells every ``heartbeat`` seconds that it goes on, and how long it took."""
  console = console or Console()
  started = time.monotonic()
  done = threading.Event()
  say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)

  def beat() -> None:
    while not done.wait(heartbeat):
      say(f"  still {text} ({time.monotonic() - started:.0f} s)")

  say(f"{text} …")
  thread = threading.Thread(target=beat, name="phase-heartbeat", daemon=True)
  thread.start()
  outcome = "failed after"
  try:
    yield
    outcome = "done in"
  finally:
    done.set()
    thread.join()
    elapsed = time.monotonic() - started
    say(f"{text}: {outcome} {elapsed:.1f} s")


def summary(metrics: Mapping[str, Any]) -> str:
  """``reward 0.41  staleness 0.80 …`` of the metrics that there are."""
  shown = SHOWN if "episode/reward" in metrics else SHOWN + SHOWN_WITHOUT_REWARD
  parts = [
    f"{label} {form.format(float(np.asarray(metrics[name])))}"
    for label, name, form in shown
    if name in metrics
  ]
  return "  ".join(parts)


class ProgressBar:
  """A bar of ``total`` steps with the numbers of the previous one; a context manager."""

  def __init__(self, label: str, total: int, console: Console):
    self.label = label
    self.total = total
    self.console = console
    self._held: Mapping[str, Any] = {}
    self._last_line = time.monotonic()
    self._first: tuple[int, float] | None = None  # the first update, which compilation preceded
    self._bar: rich_progress.Progress | None = None
    if console.is_terminal:
      self._bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("ETA"),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.fields[numbers]}"),
        console=console,
        refresh_per_second=4,
      )
      self._task = self._bar.add_task(label, total=total, numbers="")

  def __enter__(self) -> "ProgressBar":
    if self._bar is not None:
      self._bar.start()
    return self

  def __exit__(self, *exception: object) -> None:
    if self._bar is not None:
      self._bar.stop()

  def update(self, step: int, metrics: Mapping[str, Any]) -> None:
    """``step`` steps are done.

    ``metrics`` are the last one's; device arrays among them are read at the next update only.
    """
    previous, self._held = self._held, metrics
    last = step >= self.total
    now = time.monotonic()
    self._first = self._first or (step, now)
    if self._bar is None and not last and now - self._last_line < LINE_SECONDS:
      return
    pending = any(isinstance(value, jax.Array) for value in metrics.values())
    numbers = summary(jax.device_get(previous if pending and not last else metrics))
    if self._bar is not None:
      self._bar.update(self._task, completed=step, numbers=numbers)
      return
    self._last_line = now
    eta = ""
    if step > self._first[0] and not last:
      per_step = (now - self._first[1]) / (step - self._first[0])
      eta = f"ETA {_minutes(per_step * (self.total - step))}"
    parts = (f"{self.label} {step}/{self.total}", numbers, eta)
    self._line("  ".join(part for part in parts if part))

  def waiting(self, counters: Mapping[str, Any]) -> None:
    """Says what a step is waiting for; called again as long as it does."""
    where = ", ".join(f"{n} {name}" for name, n in counters.items() if n and "/" not in name)
    self._line(f"{self.label}: waiting for episodes; so far {where}")

  def _line(self, text: str) -> None:
    self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
  return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
