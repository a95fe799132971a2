"""Arms × seeds: each cell is a run of ``sao-jax train``; then one table and one figure of all.

An experiment is a Python file with ``get_experiment() -> Experiment``.  Cells run one after another
(``jobs`` at once), each in a process of its own; a cell that is done is not run again, one that was
stopped goes on.  Cells of equal settings share their supervised start and value pretraining.
"""

import dataclasses
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sao_jax import loader
from sao_jax.config import Config, ConfigError
from sao_jax.outcome import EXIT_AGAIN, Preempted, RunFailed
from sao_jax.train.folder import read_object
from sao_jax.train.identity import plain, sft_settings, value_settings
from sao_jax.train.jsonlines import read_rows, write_whole
from sao_jax.train.preemption import Preemption
from sao_jax.train.tables import Results, draw, markdown

POLL_SECONDS = 0.2
# For ``Experiment.small``: the quickstart in seconds, on easier problems.
SMALL: dict[str, Any] = {
  "num_steps": 5,
  "batch_size": 16,
  "model.d_model": 32,
  "model.num_layers": 1,
  "model.d_ff": 32,
  "task.difficulty": 2,
  "task.digits": 1,
  "task.eval_size": 8,
  "sft.steps": 120,
  "sft.batch_size": 16,
  "sft.lr": 1e-2,
  "value_pretrain.rollouts": 64,
  "value_pretrain.epochs": 1,
  "value_pretrain.batch_size": 16,
  "evaluate.problems": 8,
  "evaluate.greedy": False,
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One row of the table.

  The first word of ``name`` decides the colour in the figure, the rest the line.
  """

  name: str
  config: str | os.PathLike[str]
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What is compared.

  Args:
    name: of its folder, runs/experiments/<name>.
    question: what the table answers; its caption.
    arms: rows of the table.
    columns: title → number of one run, from the rows of its metrics.jsonl (``tables`` has some).
    baseline: the arm that all others are compared with, seed by seed, in the columns ``compared``.
    compared: some of ``columns``.
    curves: metrics that the figure draws.
    learns: whether the table and the figure also show reward at equal tokens and equal time.
    seeds: of each arm.
    changes: of every arm, before its own.
    small: changes for ``--small``, after the arm's own, but for those of a stage that the arm does
      without; with them the first seed alone is run.
  """

  name: str
  question: str
  arms: tuple[Arm, ...]
  columns: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], float]]
  baseline: str
  compared: tuple[str, ...]
  curves: tuple[str, ...] = ("episode/reward",)
  learns: bool = True
  seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
  changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  small: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run."""

  arm: str
  seed: int
  path: str
  overrides: Mapping[str, Any]
  config: Config

  @property
  def name(self) -> str:
    return f"{self.arm}, seed {self.seed}"

  def command(self) -> list[str]:
    values = {k: v if isinstance(v, str) else repr(v) for k, v in self.overrides.items()}
    changes = [f"--config.{path}={value}" for path, value in values.items()]
    return [sys.executable, "-m", "sao_jax.cli", "train", f"--config={self.path}", *changes]

  def done(self) -> bool:
    """Whether it is complete; raises ConfigError if it was made with other settings."""
    results, start = (
      read_object(self.config.folder / name, lambda text: None)  # damaged: not done
      for name in ("results.json", "run.json")
    )
    if results.get("step") != self.config.num_steps or "config" not in start:
      return False
    had = start["config"]
    wants = plain(dict(loader.leaves(self.config)))
    changed = [f"{p} = {had.get(p)!r}, now {wants[p]!r}" for p in wants if had.get(p) != wants[p]]
    if changed:
      raise ConfigError(
        f"{self.config.folder} was run with {'; '.join(changed[:3])}: remove that folder, or change the "
        "experiment's name"
      )
    return True


def read(path: str) -> Experiment:
  """The file's experiment; raises ConfigError where it has none, or one that cannot be tabulated."""
  file = Path(path)
  if not file.is_file():
    known = sorted(map(str, Path("configs/experiments").glob("*.py")))
    hint = f" Found here: {', '.join(known)}." if known else ""
    raise ConfigError(f"{path}: no such file (from {Path.cwd()}).{hint}")
  try:
    make = runpy.run_path(str(file), run_name="experiment").get("get_experiment")
    experiment = make() if make is not None else None
  except Exception as error:
    raise ConfigError(f"{path}: {loader.where(error, file)}") from error
  if not isinstance(experiment, Experiment):
    raise ConfigError(f"{path}: the file has no get_experiment() that returns an Experiment")
  names = [arm.name for arm in experiment.arms]
  for name in (experiment.name, *names):
    if Path(name).name != name:
      raise ConfigError(f"{path}: {name!r} names a folder or file: leave slashes out")
  if len({folder_name(name) for name in names}) < len(names):
    raise ConfigError(f"{path}: two arms have the same name, or folder: {', '.join(names)}")
  if experiment.baseline not in names:
    raise ConfigError(f"{path}: baseline = {experiment.baseline!r} is none of {', '.join(names)}")
  if isinstance(experiment.compared, str):
    raise ConfigError(
      f"{path}: compared = {experiment.compared!r} is one string: write a tuple of columns"
    )
  for title in experiment.compared:
    if title not in experiment.columns:
      raise ConfigError(f"{path}: compared = {title!r} is none of {', '.join(experiment.columns)}")
  return experiment


def folder_name(arm: str) -> str:
  return arm.replace(" ", "-")


def cells(experiment: Experiment, folder: Path, seeds: Sequence[int], small: bool) -> list[Cell]:
  """Every run, checked before the first one starts; seed by seed, so that a part is of use."""
  found = []
  for seed in seeds:
    for arm in experiment.arms:
      changes = {**experiment.changes, **arm.changes}
      if small:
        changes |= _of_its_stages(experiment.small, loader.load(str(arm.config), changes))
      run_dir = str(folder / f"{folder_name(arm.name)}-seed{seed}")
      overrides = changes | {"seed": seed, "run_dir": run_dir, "report.enabled": False}
      config = loader.load(str(arm.config), overrides)
      found.append(Cell(arm.name, seed, str(arm.config), overrides, config))
  return found


def _of_its_stages(changes: Mapping[str, Any], config: Config) -> dict[str, Any]:
  has = {"sft": config.sft.steps > 0, "value_pretrain": config.value_pretrain.rollouts > 0}
  return {path: x for path, x in changes.items() if has.get(path.partition(".")[0], True)}


def run_experiment(
  path: str,
  *,
  small: bool = False,
  seeds: Sequence[int] | None = None,
  jobs: int = 1,
  out: str = "",
  report: Callable[[str], None] = print,
) -> Path:
  """``sao-jax experiment``: runs what is not done yet and writes NAME.md, NAME.png and NAME.json.

  Args:
    path: the experiment's file.
    small: minutes instead of an hour: does it run at all.
    seeds: instead of the experiment's.
    jobs: runs at once; more than one makes every time in the table a time on a shared machine.
    out: folder of the table and figure; default: that of the runs.
    report: gets a line per run.
  Returns:
    The table's file.

  Raises:
    ConfigError: the file, an arm, or a finished run of other settings.
    RunFailed: no run came to its end, or one lacks what a column is made of.
    Preempted: stopped by SIGTERM; the same command goes on.
  """
  experiment = read(path)
  seeds = list(seeds if seeds is not None else experiment.seeds[:1] if small else experiment.seeds)
  if jobs < 1 or not seeds or len(set(seeds)) < len(seeds):
    raise ConfigError(f"jobs = {jobs} and seeds = {seeds}: one or more of each, no seed twice")
  folder = Path("runs/experiments") / (experiment.name + ("-small" if small else ""))
  every = cells(experiment, folder, seeds, small)
  left = [cell for cell in every if not cell.done()]
  report(f"{experiment.name}: {len(every)} runs in {folder}, {len(every) - len(left)} done before")
  failures = _run_all(left, every, jobs, report)
  results = collect(experiment, every, failures)
  target = Path(out) if out else folder
  target.mkdir(parents=True, exist_ok=True)
  draw(results, experiment.curves, target / f"{experiment.name}.png")
  options = (" --small" if small else "") + (f" --jobs={jobs}" if jobs > 1 else "")
  command = f"sao-jax experiment {path}{options} --seeds={','.join(map(str, seeds))}"
  table = target / f"{experiment.name}.md"
  write_whole(table, markdown(results, experiment.question, command))
  write_whole(target / f"{experiment.name}.json", json.dumps(results.plain(), indent=1))
  report(table.read_text())
  report(f"{table}, and beside it the figure and every run's numbers")
  return table


# --- Running ---


def _run_all(
  left: Sequence[Cell], every: Sequence[Cell], jobs: int, report: Callable[[str], None]
) -> dict[str, str]:
  """Runs the cells; returns what those that failed said last, by the cell's name."""
  failures: dict[str, str] = {}
  began, finished = time.monotonic(), 0
  stop = Preemption()

  def run(cell: Cell) -> None:
    nonlocal finished
    if stop.requested.is_set():
      return
    _share_stages(cell, every)
    start = time.monotonic()
    status = _run_one(cell, stop.requested)
    if stop.requested.is_set() or status == EXIT_AGAIN:
      stop.requested.set()
      return
    finished += 1
    rest = (time.monotonic() - began) / finished * (len(left) - finished)
    how = "done" if status == 0 else f"failed with status {status}"
    if status:
      failures[cell.name] = _last_words(cell)
      how += f": {failures[cell.name]}"
    report(
      f"[{finished} of {len(left)}] {cell.name}: {how} after {time.monotonic() - start:.0f} s, "
      f"{rest / 60:.0f} min left"
    )

  with stop.listening(), ThreadPoolExecutor(jobs) as pool:
    try:
      for future in [pool.submit(run, cell) for cell in left]:
        future.result()
    except BaseException:  # ctrl-C: those that wait are not begun, those that run save and leave
      stop.requested.set()
      raise
  if stop.requested.is_set():
    raise Preempted(f"{finished} of {len(left)} runs of this experiment are done")
  return failures


def _run_one(cell: Cell, stop: threading.Event) -> int:
  """The run's exit status; it is stopped, and saves, when the experiment is."""
  folder = cell.config.folder
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / "console.log").open("a") as log:
    # A session of its own: ctrl-C is for the experiment, which lets its runs save.
    process = subprocess.Popen(
      cell.command(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
      while process.poll() is None:
        if stop.is_set():
          process.terminate()
          return process.wait()
        time.sleep(POLL_SECONDS)
      return process.returncode
    finally:
      if process.poll() is None:
        process.terminate()
        process.wait()


def _last_words(cell: Cell) -> str:
  lines = (cell.config.folder / "console.log").read_text(errors="replace").strip().splitlines()
  return lines[-1][:200] if lines else "it said nothing"


def _share_stages(cell: Cell, every: Sequence[Cell]) -> None:
  """Copies the stages before RL from a run that is over, where they would be trained again alike."""
  for stage, settings in (("sft", sft_settings), ("value", value_settings)):
    target = cell.config.folder / stage
    if target.exists():
      continue
    for other in every:
      source = other.config.folder / stage
      over = (other.config.folder / "results.json").is_file()
      if over and source.is_dir() and settings(cell.config) == settings(other.config):
        whole = target.with_name(f".{stage}-copy")
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(source, whole)
        whole.rename(target)
        break


# --- Reading ---


def collect(experiment: Experiment, every: Sequence[Cell], failures: Mapping[str, str]) -> Results:
  """The rows of every run that came to its end.

  Raises RunFailed if none did.
  """
  found: dict[str, dict[int, list[dict[str, Any]]]] = {arm.name: {} for arm in experiment.arms}
  for cell in every:
    if cell.name not in failures:
      found[cell.arm][cell.seed] = read_rows(cell.config.folder / "metrics.jsonl")
  if not any(found.values()):
    raise RunFailed(f"no run came to its end; the first said: {next(iter(failures.values()))}")
  return Results(
    found,
    experiment.columns,
    experiment.baseline,
    experiment.compared,
    dict(failures),
    experiment.learns,
  )
