"""A run's folder: locked while a process works in it, never overwritten, and what a stop means in it."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from sao_jax.checks import check
from sao_jax.config import Config, ConfigError
from sao_jax.loader import leaves
from sao_jax.outcome import Preempted, RunFailed, one_line, out_of_room
from sao_jax.rollout.service import Stopped
from sao_jax.train.jsonlines import write_whole
from sao_jax.train.preemption import Preemption
from sao_jax.train.preview import preview, settings
from sao_jax.train.progress import phase
from sao_jax.train.stage import refusals

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Run:
  """One process at work in one run folder."""

  config: Config
  folder: Path
  console: Console
  stop: Preemption

  def report(self, text: str) -> None:
    self.console.print(text, highlight=False, markup=False, soft_wrap=True)

  def phase(self, text: str) -> contextlib.AbstractContextManager[None]:
    self.stop.check(f"before {text}")
    return phase(text, self.console)


@contextlib.contextmanager
def opened(config: Config, fresh: bool, *, starts: bool = True) -> Iterator[Run]:
  """The run's folder, locked; with ``starts`` the run is announced and noted in run.json."""
  check(config)
  lines = preview(config)
  folder = config.folder
  if fresh and folder.exists():
    refuse_foreign(folder)
    with locked(folder):  # never under a run that goes on
      put_aside(folder)
  if not starts and not folder.is_dir():
    raise ConfigError(f"{folder}: no such folder; name that of a run with --config.run_dir=…")
  with refusals():
    folder.mkdir(parents=True, exist_ok=True)
  if starts:
    refuse_unwritable(folder)
  run = Run(config, folder, Console(), Preemption())
  with locked(folder) if starts else contextlib.nullcontext(), run.stop.listening():
    if starts:
      run.report(f"run: {config.name} in {folder}")
      for line in (*settings(config), *lines):
        run.report(line)
    try:
      yield run
    except Stopped as error:
      raise Preempted(str(error)) from error
    except Exception as error:
      if isinstance(error, RunFailed) or not out_of_room(error):
        raise
      free = shutil.disk_usage(folder).free / 2**20
      raise RunFailed(
        f"{folder}: {one_line(error)} ({free:,.1f} MiB are free). Make room and run the same command: "
        "it goes on from the last checkpoint."
      ) from error


def refuse_unwritable(folder: Path) -> None:
  """Raises ConfigError now, not after hours, where nothing can be written."""
  if not os.access(folder, os.W_OK):
    raise ConfigError(
      f"{folder} cannot be written to: change its permissions or mount, or copy it and name the copy "
      "with --config.run_dir=…"
    )


def refuse_foreign(folder: Path) -> None:
  """Raises ConfigError unless the folder is empty or a run's: --fresh would rename it."""
  known = {".lock", "run.json", "sft", "value", "checkpoints", "metrics.jsonl"}
  if not folder.is_dir() or (any(folder.iterdir()) and known.isdisjoint(os.listdir(folder))):
    raise ConfigError(
      f"--fresh puts an old run aside, and {folder} is none: choose another --config.run_dir"
    )


def put_aside(folder: Path) -> None:
  """Keeps an old run under the next free name."""
  number = next(n for n in itertools.count(1) if not Path(f"{folder}.{n}").exists())
  folder.rename(f"{folder}.{number}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
  """Two processes in one folder would write over each other.  A killed one leaves no lock."""
  with (folder / ".lock").open("w") as file:
    if fcntl is not None:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError as error:
        raise ConfigError(
          f"{folder} is in use by another process: wait for it, or choose another --config.run_dir"
        ) from error
    yield


def note_start(run: Run, incarnation: int, step: int) -> None:
  """Adds this start to run.json."""
  path = run.folder / "run.json"
  earlier = read_object(path, run.report).get("incarnations", [])
  started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  document = {
    "name": run.config.name,
    "config": dict(leaves(run.config)),
    "versions": {
      "sao_jax": importlib.metadata.version("sao-jax"),
      "jax": importlib.metadata.version("jax"),
      "python": platform.python_version(),
    },
    "incarnations": [
      *earlier,
      {"incarnation": incarnation, "started": started, "step": step},
    ],
  }
  write_whole(path, json.dumps(document, indent=1))


def read_object(path: Path, report: Callable[[str], None]) -> dict[str, Any]:
  """The JSON object of a file that can be done without; empty, with a line, where it is damaged."""
  if not path.exists():
    return {}
  try:
    found = json.loads(path.read_text())
  except ValueError:
    found = None
  if not isinstance(found, dict):
    report(f"{path} is no JSON object: it is written anew")
    return {}
  return found
