"""What an experiment found: numbers of its runs, the table and the figure.

A column of an experiment is a function from the rows of one run's metrics.jsonl to a number; the
functions here make the usual ones.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.outcome import RunFailed
from sao_jax.train.curves import smooth
from sao_jax.train.evaluate import bootstrap_interval

Row = Mapping[str, Any]
Measure = Callable[[Sequence[Row]], float]

REWARD, TOKENS, SECONDS = "episode/reward", "batch/action_tokens", "time/step"
WINDOW = 0.2  # of a budget: the rewards before it that are averaged
COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#718096", "#6b46c1", "#b7791f", "#0987a0")
LINES = ("solid", "dashed", "dotted", "dashdot")


def series(rows: Sequence[Row], metric: str) -> np.ndarray:
  """The metric at every RL step that has it; NaN where it was not finite."""
  return np.array([row[metric] for row in rows if row["step"] > 0 and metric in row], np.float64)


def mean(metric: str, missing: float | None = None) -> Measure:
  """``missing`` is the number of a run that does without the metric."""

  def measure(rows: Sequence[Row]) -> float:
    found = series(rows, metric)
    return missing if missing is not None and not len(found) else _of(np.mean, found, metric)

  return measure


def last(metric: str, share: float = 0.25) -> Measure:
  """Mean over the last ``share`` of the steps."""

  def measure(rows: Sequence[Row]) -> float:
    found = series(rows, metric)
    return _of(np.mean, found[-max(1, round(share * len(found))) :], metric)

  return measure


def largest(metric: str, missing: float | None = None) -> Measure:
  def measure(rows: Sequence[Row]) -> float:
    found = series(rows, metric)
    return missing if missing is not None and not len(found) else _of(np.max, found, metric)

  return measure


def median(metric: str, missing: float | None = None) -> Measure:
  """Of times, which a step that compiles would drag up."""

  def measure(rows: Sequence[Row]) -> float:
    found = series(rows, metric)
    return missing if missing is not None and not len(found) else _of(np.median, found, metric)

  return measure


def per_second(metric: str) -> Measure:
  """Its sum over the sum of the steps' times, after the first step, which compiles."""

  def measure(rows: Sequence[Row]) -> float:
    found, seconds = series(rows, metric), series(rows, SECONDS)
    first = min(1, len(seconds) - 1)
    return _of(np.sum, found[first:], metric) / _of(np.sum, seconds[first:], SECONDS)

  return measure


def final(metric: str) -> Measure:
  """The metric where it was measured last, such as the evaluation after RL."""
  return lambda rows: _of(lambda found: found[-1], series(rows, metric), metric)


def spent(rows: Sequence[Row], metric: str) -> np.ndarray:
  """The metric summed up to each step; seconds without those of the first step, which compiles."""
  found = series(rows, metric)
  if metric == SECONDS:
    found[:1] = 0.0
  return np.cumsum(found)


def _of(function: Callable[[np.ndarray], Any], found: np.ndarray, metric: str) -> float:
  if not len(found):
    raise ValueError(f"the run has no metric {metric!r}")
  return float(function(found))


@dataclasses.dataclass(frozen=True)
class Results:
  """Rows of metrics.jsonl by arm and seed, and how to read them.

  Args:
    runs: arm → seed → rows.
    columns: title → number of one run.
    baseline, compared, learns: see ``experiment.Experiment``.
    failures: run → its last words.
  """

  runs: Mapping[str, Mapping[int, Sequence[Row]]]
  columns: Mapping[str, Measure]
  baseline: str
  compared: Sequence[str]
  failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
  learns: bool = True

  def values(self, arm: str, measure: Measure) -> dict[int, float]:
    """By seed; raises RunFailed naming the run that lacks what a column is made of."""
    found = {}
    for seed, rows in self.runs[arm].items():
      try:
        found[seed] = measure(rows)
      except ValueError as error:
        raise RunFailed(f"{arm}, seed {seed}: {error}: mend the columns and run again") from error
    return found

  def budget(self, metric: str) -> float:
    """The most of a cumulative metric that every run spent."""
    return min(float(spent(r, metric)[-1]) for runs in self.runs.values() for r in runs.values())

  def all_columns(self) -> dict[str, Measure]:
    """The experiment's, and reward at the budget of tokens and of time that all runs share."""
    if not self.learns:
      return dict(self.columns)
    tokens, seconds = self.budget(TOKENS), self.budget(SECONDS)
    return {
      **self.columns,
      f"reward at {tokens:,.0f} sampled tokens": at_budget(TOKENS, tokens),
      f"reward at {seconds:.3g} s of RL": at_budget(SECONDS, seconds),
    }

  def difference(self, arm: str, title: str) -> np.ndarray:
    """The column's number of the arm minus the baseline's, of each seed that both have."""
    measure = self.columns[title]
    ours, theirs = self.values(arm, measure), self.values(self.baseline, measure)
    return np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])

  def plain(self) -> dict[str, Any]:
    """Every run's numbers, for JSON."""
    columns, found = self.all_columns(), []
    for arm, runs in self.runs.items():
      values = {title: self.values(arm, f) for title, f in columns.items()}
      for seed in runs:
        numbers = {title: _finite(by_seed[seed]) for title, by_seed in values.items()}
        found.append({"arm": arm, "seed": seed, **numbers})
    return {"runs": found, "failures": dict(self.failures)}


def _finite(x: float) -> float | None:
  return x if np.isfinite(x) else None  # JSON has no NaN


def at_budget(metric: str, budget: float) -> Measure:
  """Mean reward of the steps in the last fifth before the budget was spent."""

  def measure(rows: Sequence[Row]) -> float:
    costs, rewards = spent(rows, metric), series(rows, REWARD)
    inside = costs <= budget * (1 + 1e-9)
    inside[0] = True  # one step may cost more than the budget
    near = inside & (costs > (1 - WINDOW) * costs[inside][-1])
    near[inside.sum() - 1] = True
    return float(rewards[: len(costs)][near].mean())

  return measure


def interval(values: Sequence[float]) -> str:
  """Mean and, of two or more, its bootstrap 95 % interval."""
  x = np.asarray(values, np.float64)
  if not len(x):
    return "failed"
  if not np.isfinite(x).all():
    return "not finite"
  if len(x) < 2:
    return _number(x.mean())
  low, high = bootstrap_interval(x)
  return f"{_number(x.mean())} [{_number(low)}, {_number(high)}]"


def _number(x: float) -> str:
  if 0 < abs(x) < 0.01:
    return f"{x:.2g}"
  return f"{x:.3f}" if abs(x) < 10 else f"{x:.1f}" if abs(x) < 100 else f"{x:,.0f}"


def markdown(results: Results, question: str, command: str) -> str:
  """The table, with what made it."""
  columns = results.all_columns()
  against = [f"{title}, minus {results.baseline}" for title in results.compared]
  lines = ["arm", "runs", *columns, *against]
  table = ["| " + " | ".join(lines) + " |", "|" + "---|" * len(lines)]
  for arm, runs in results.runs.items():
    lost = sum(name.startswith(f"{arm}, seed") for name in results.failures)
    cells = [arm, f"{len(runs)}" + (f" of {len(runs) + lost}" if lost else "")]
    cells += [interval(list(results.values(arm, f).values())) for f in columns.values()]
    for title in results.compared:
      difference = results.difference(arm, title)
      if arm == results.baseline:
        cells.append("0")
      else:
        cells.append(interval(difference.tolist()) if len(difference) else "no seed to compare")
    table.append("| " + " | ".join(cells) + " |")
  seeds = sorted({seed for runs in results.runs.values() for seed in runs})
  notes = [
    f"Seeds {', '.join(map(str, seeds))}. "
    + (
      "Intervals: percentile bootstrap over seeds, 95 %; differences are paired by seed."
      if len(seeds) > 1
      else "One seed: no intervals, no claim."
    )
  ]
  notes += [f"Failed: {name}: {said}" for name, said in results.failures.items()]
  return "\n".join([question, "", f"    {command}", "", *table, "", *notes, ""])


def draw(results: Results, curves: Sequence[str], path: str | os.PathLike[str]) -> None:
  """Curves over steps and, of runs that learn, reward over sampled tokens and time, as a PNG.

  A line is the mean over seeds, smoothed over a tenth of the run; its band spans the seeds.
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  panels: list[tuple[str, str, str | None]] = [(name, "step", None) for name in curves]
  if results.learns:
    panels += [(REWARD, "thousand sampled tokens", TOKENS), (REWARD, "seconds of RL", SECONDS)]
  wide = min(3, len(panels))
  tall = -(-len(panels) // wide)
  figure = Figure(figsize=(4.6 * wide, 3.4 * tall + 0.4), dpi=130, layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(tall, wide, squeeze=False).ravel()
  for axis, (metric, label, over) in zip(axes, panels, strict=False):
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(True, color="#e2e8f0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(metric, loc="left", fontsize=10)
    axis.set_xlabel(label)
    for arm, runs in results.runs.items():
      _curve(axis, list(runs.values()), metric, over, arm, _style(arm, results.runs))
    if not axis.lines:
      axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
  for axis in axes[len(panels) :]:
    axis.remove()
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(4, len(labels)),
    frameon=False,
    fontsize=8,
  )
  figure.savefig(path)


def _style(arm: str, arms: Mapping[str, Any]) -> dict[str, Any]:
  """Colour by the first word of the name, line by the rest."""
  firsts = list(dict.fromkeys(name.split()[0] for name in arms))
  rests = list(dict.fromkeys(name.partition(" ")[2] for name in arms))
  return {
    "color": COLORS[firsts.index(arm.split()[0]) % len(COLORS)],
    "linestyle": LINES[rests.index(arm.partition(" ")[2]) % len(LINES)],
  }


def _curve(
  axis: Any, runs: Sequence[Sequence[Row]], metric: str, over: str | None, arm: str, style: dict
) -> None:
  found = [series(rows, metric) for rows in runs]
  length = min(map(len, found), default=0)
  if not length:
    return
  values = np.stack([_smooth(x[:length]) for x in found])
  if over is None:
    x = np.linspace(1, min(max(r["step"] for r in rows) for rows in runs), length)
  else:
    scale = 1e3 if over == TOKENS else 1.0
    x = np.stack([spent(rows, over)[:length] for rows in runs]).mean(0) / scale
  axis.plot(x, values.mean(0), label=arm, linewidth=1.8, **style)
  if len(runs) > 1:
    axis.fill_between(
      x, values.min(0), values.max(0), color=style["color"], alpha=0.12, linewidth=0
    )


def _smooth(values: np.ndarray) -> np.ndarray:
  """Of the finite ones near each step."""
  finite = np.isfinite(values)
  with np.errstate(invalid="ignore"):
    return smooth(np.where(finite, values, 0.0)) / smooth(finite.astype(np.float64))
