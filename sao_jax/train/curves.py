"""The figure of a run: what was learned, how old the data was, what the machine did."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

BLUE, ORANGE, GREEN, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#718096"
MOST_BANDS = 7  # staleness of this and more shares one band
Row = dict[str, Any]


def draw(history: Sequence[Row], path: str | os.PathLike[str], title: str = "") -> None:
  """Draws the rows of ``metrics.jsonl`` as a PNG of six panels; see ``metrics`` for the names."""
  # The object interface, without pyplot: no global state, no display, safe off the main thread.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(13.5, 7.2), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(2, 3)
  panels = (_reward, _staleness, _masked, _explained_variance, _throughput, _length)
  for axis, panel in zip(axes.flat, panels, strict=True):
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e2e8f0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)
    if not panel(axis, history):
      axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)
    elif panel is _staleness:  # the bars fill the panel
      axis.legend(
        frameon=False, fontsize=8, ncols=MOST_BANDS, loc="lower right", bbox_to_anchor=(1.0, 0.99),
        handlelength=1.0, columnspacing=1.0, borderpad=0.0,
      )  # fmt: skip
    elif axis.get_legend_handles_labels()[0]:
      axis.legend(frameon=False, fontsize=8, loc="best")
  for axis in axes[1]:
    axis.set_xlabel("step")
  if title:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
  figure.savefig(path)


def _series(history: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
  pairs = [(row["step"], row[name]) for row in history if row.get(name) is not None]
  steps, values = np.array(pairs, float).reshape(-1, 2).T
  return steps, values


def smooth(values: np.ndarray) -> np.ndarray:
  """Mean over a centred window of a tenth of the run, cut off at the ends."""
  half = max(1, len(values) // 20)
  sums = np.concatenate([[0.0], np.cumsum(values)])
  index = np.arange(len(values))
  low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
  return (sums[high] - sums[low]) / (high - low)


def _line(axis: Any, history: Sequence[Row], name: str, color: str, label: str | None) -> bool:
  """The metric, faint, and its running mean; False if the run has none."""
  steps, values = _series(history, name)
  if not len(steps):
    return False
  if len(steps) < 10:
    axis.plot(steps, values, color=color, label=label, marker="o", markersize=3)
  else:
    axis.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axis.plot(steps, smooth(values), color=color, linewidth=2, label=label)
  return True


def _reward(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("reward", loc="left", fontsize=10)
  found = _line(axis, history, "episode/reward", BLUE, "training batches")
  for name, color, label, above in (
    ("eval/sampled", ORANGE, "held out, sampled", -14),
    ("eval/greedy", GREEN, "held out, greedy", 7),
  ):
    steps, values = _series(history, name)
    if len(steps):
      found = True
      axis.plot(
        steps, values, color=color, label=label, marker="o", markersize=6, linestyle="--",
        linewidth=1.2, clip_on=False, zorder=3,
      )  # fmt: skip
      axis.annotate(
        f"{values[-1]:.2f}", (steps[-1], values[-1]), xytext=(-4, above), textcoords="offset points",
        ha="right", fontsize=8, color=color,
      )  # fmt: skip
  low, high = axis.get_ylim()
  if found and low >= -0.1 and high <= 1.2:
    axis.set_ylim(0, 1.05)
  return found


def _staleness(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("staleness of trained tokens", loc="left", fontsize=10)
  rows = [row for row in history if row.get("staleness/histogram")]
  if not rows:
    mean = _line(axis, history, "staleness/mean", BLUE, "mean")
    return _line(axis, history, "staleness/max", ORANGE, "largest") or mean
  width = max(len(row["staleness/histogram"]) for row in rows)
  counts = np.zeros((len(rows), max(width, 1)))
  for i, row in enumerate(rows):
    counts[i, : len(row["staleness/histogram"])] = row["staleness/histogram"]
  while counts.shape[1] > 1 and not counts[:, -1].any():
    counts = counts[:, :-1]
  if counts.shape[1] > MOST_BANDS:
    rest = counts[:, MOST_BANDS - 1 :].sum(1, keepdims=True)
    counts = np.concatenate([counts[:, : MOST_BANDS - 1], rest], 1)
  shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  bands = shares.shape[1]
  labels = [str(d) for d in range(bands)]
  if width > MOST_BANDS:
    labels[-1] = f"{bands - 1} or more"
  import matplotlib

  colors = matplotlib.colormaps["Blues"](np.linspace(0.25, 0.95, max(bands, 2)))[:bands]
  steps = np.array([row["step"] for row in rows], float)
  bottom = np.zeros(len(rows))
  gap = float(np.diff(steps).min()) if len(steps) > 1 else 1.0
  for d in range(bands):
    axis.bar(steps, shares[:, d], gap, bottom=bottom, color=colors[d], label=labels[d], linewidth=0)
    bottom = bottom + shares[:, d]
  axis.set_ylim(0, 1)
  _percent(axis)
  return True


def _masked(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("tokens kept out of the policy loss", loc="left", fontsize=10)
  low = _line(axis, history, "loss/masked_low", BLUE, "ratio below the band")
  high = _line(axis, history, "loss/masked_high", ORANGE, "ratio above the band")
  stale = _line(axis, history, "staleness/masked_share", GREY, "too old")
  if low or high or stale:
    top = axis.get_ylim()[1]
    axis.set_ylim(0, max(top, 0.01))
    _percent(axis)
  return low or high or stale


def _explained_variance(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("explained variance of the critic", loc="left", fontsize=10)
  found = _line(axis, history, "critic/explained_variance", BLUE, None)
  if found:
    axis.set_ylim(max(-1.0, min(0.0, axis.get_ylim()[0])), 1)
    axis.axhline(0, color=GREY, linewidth=0.8)
  return found


def _throughput(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("action tokens per second, busy shares", loc="left", fontsize=10)
  speed = _line(axis, history, "throughput/tokens_per_second", GREY, "tokens/s (left)")
  if speed:
    axis.set_ylim(0, axis.get_ylim()[1])
  right = _right_axis(axis)
  trainer = _line(right, history, "time/trainer_busy", BLUE, "trainer busy (right)")
  engine = _line(right, history, "time/engine_busy", ORANGE, "engine busy (right)")
  right.set_ylim(0, 1.05)
  _percent(right)
  _joint_legend(axis, right)
  right.set_visible(trainer or engine)
  return speed or trainer or engine


def _length(axis: Any, history: Sequence[Row]) -> bool:
  axis.set_title("per episode", loc="left", fontsize=10)
  length = _line(axis, history, "episode/actions", BLUE, "sampled tokens (left)")
  if length:
    axis.set_ylim(0, axis.get_ylim()[1])
  right = _right_axis(axis)
  calls = _line(right, history, "episode/calls", ORANGE, "tool calls (right)")
  if calls:
    right.set_ylim(0, max(1.05, right.get_ylim()[1]))
  _joint_legend(axis, right)
  right.set_visible(calls)
  return length or calls


def _right_axis(axis: Any) -> Any:
  right = axis.twinx()
  right.spines[["top", "left"]].set_visible(False)
  right.margins(x=0.01)
  return right


def _joint_legend(axis: Any, right: Any) -> None:
  """Lets the left axis' legend show the lines of both."""
  for handle, label in zip(*right.get_legend_handles_labels(), strict=True):
    axis.plot([], [], color=handle.get_color(), label=label, linewidth=2)


def _percent(axis: Any) -> None:
  from matplotlib.ticker import PercentFormatter

  axis.yaxis.set_major_formatter(PercentFormatter(1.0))
