"""Shared timing helpers: interleaved rounds on one core, CPU seconds, medians of ratios; one table.

A figure taken alone on a shared machine says little.  Here both sides run in one process pinned to
one core with one thread each, in turn, and are timed by CPU seconds; a ratio is the median of the
ratios within a round, so that a slow spell of the machine hits both sides of it.
"""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from sao_jax import memory


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table: one bar, one measure, at most one peer.

  ``ours`` and ``theirs`` are in ``unit`` (seconds print as ms or µs).  The bar is on ``ratio``
  (ours / theirs) where a peer is named, else on ``ours``; ``judge = "ours"`` forces the latter.
  ``must`` and ``excellent`` are upper bounds, or lower ones with ``higher_is_better``.  ``limit`` is
  what the machine or the algorithm allows, in words.  A peer that is not installed leaves
  ``theirs = None`` and the reason in ``note``: the row then shows our own figure and no verdict.
  """

  bar: str
  measure: str
  ours: float
  unit: str = "s"
  peer: str = ""
  theirs: float | None = None
  ratio: float | None = None
  must: float | None = None
  excellent: float | None = None
  limit: str = ""
  higher_is_better: bool = False
  judge: str = "ratio"
  note: str = ""

  @property
  def judged(self) -> float | None:
    return self.ours if self.judge == "ours" or not self.peer else self.ratio

  @property
  def verdict(self) -> str:
    if self.must is None:
      return "info"
    if self.judged is None:
      return "no peer"
    if self.excellent is not None and self._reaches(self.excellent):
      return "excellent"
    return "pass" if self._reaches(self.must) else "FAIL"

  def _reaches(self, bound: float) -> bool:
    assert self.judged is not None
    return self.judged >= bound if self.higher_is_better else self.judged <= bound


@dataclasses.dataclass(frozen=True)
class Timings:
  """CPU seconds of each implementation per round, rounds aligned across implementations."""

  seconds: Mapping[str, Sequence[float]]

  def median(self, name: str) -> float:
    return statistics.median(self.seconds[name])

  def ratio(self, name: str, reference: str) -> float:
    """Median over rounds of time(name) / time(reference)."""
    pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
    return statistics.median(a / b for a, b in pairs)


def interleave(
  implementations: Mapping[str, Callable[[], object]],
  *,
  rounds: int = 11,
  warmup: int = 2,
  min_seconds: float = 0.0,
) -> Timings:
  """Times each callable in turn, ``rounds`` times over; each must block until its result is ready.

  A callable that ends sooner than ``min_seconds`` (in its last warm-up) is repeated within its round
  until it has run that long, and the round holds the time of one call.
  """
  repeats = dict.fromkeys(implementations, 1)
  for name, implementation in implementations.items():
    for _ in range(warmup):
      once = _cpu_seconds(implementation, 1)
      repeats[name] = max(1, round(min_seconds / max(once, 1e-7)))
  seconds: dict[str, list[float]] = {name: [] for name in implementations}
  gc.collect()
  gc.disable()
  try:
    for _ in range(rounds):
      for name, implementation in implementations.items():
        seconds[name].append(_cpu_seconds(implementation, repeats[name]))
  finally:
    gc.enable()
  return Timings(seconds)


def _cpu_seconds(implementation: Callable[[], object], repeats: int) -> float:
  start = time.process_time()
  for _ in range(repeats):
    implementation()
  return (time.process_time() - start) / repeats


def blocking(function: Callable[..., object], *args: object) -> Callable[[], object]:
  """A call of ``function`` that returns when its device arrays are ready."""
  return lambda: jax.block_until_ready(function(*args))


peers_keep_memory = False  # --peers-keep-memory


def peer(function: Callable[..., Any]) -> Callable[..., Any]:
  """A peer's call under the allocator's settings that it comes with.

  ``sao-jax`` tells glibc to keep what is freed, which saves a step the mapping of its large buffers.
  A peer does not; its buffers above 32 MiB, where glibc's own rule ends, are mapped at every call.
  """

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    if peers_keep_memory:
      return function(*args, **kwargs)
    memory.map_large_buffers()
    try:
      return function(*args, **kwargs)
    finally:
      memory.keep_freed()

  return call


def missing(peer: str, error: ImportError) -> str:
  """The note of a row whose peer is not installed."""
  return f"{peer} not installed ({error.name or error}); our figure alone"


def format_value(value: float | None, unit: str) -> str:
  if value is None:
    return "–"
  if unit != "s":
    return f"{value:,.3g} {unit}"
  for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
    if value >= scale:
      return f"{value / scale:.3g} {name}"
  return f"{value * 1e9:.3g} ns"


def print_rows(rows: Iterable[Row]) -> None:
  """Prints the table of all bars."""
  from rich.console import Console
  from rich.table import Table

  table = Table(title="ours / peer, one core, CPU time, interleaved", show_lines=False)
  for column in ("bar", "measure", "ours", "peer", "theirs", "ratio", "must", "excellent"):
    table.add_column(column, justify="left" if column in ("measure", "peer") else "right")
  for column in ("limit", "verdict", "note"):
    table.add_column(column)
  colours = {"excellent": "green", "pass": "green", "FAIL": "bold red", "no peer": "yellow"}
  for row in rows:
    sign = "≥" if row.higher_is_better else "≤"
    bound = [
      "" if b is None else f"{sign} {1 / b:.0f}⁻¹" if b < 0.02 else f"{sign} {b:g}"
      for b in (row.must, row.excellent)
    ]
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    colour = colours.get(row.verdict, "dim")
    table.add_row(
      *(row.bar, row.measure, format_value(row.ours, row.unit), row.peer or "–"),
      *(format_value(row.theirs, row.unit), ratio, *bound),
      *(row.limit, f"[{colour}]{row.verdict}[/]", row.note),
    )
  Console(width=200).print(table)
