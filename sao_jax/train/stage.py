"""What SFT and value pretraining share: a loop of updates that goes on where it was killed."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sao_jax.config import Config, ConfigError
from sao_jax.loader import leaves
from sao_jax.models.pretrained import WeightsUnavailable
from sao_jax.outcome import Preempted
from sao_jax.train.checkpoint import Checkpoints, Saved
from sao_jax.train.identity import plain
from sao_jax.train.metrics import Writer
from sao_jax.train.preemption import Preemption
from sao_jax.train.steps import require_finite
from sao_jax.types import ModelState

CHECK_EVERY = 20  # updates between looks at whether they are finite: each waits for the device


@dataclasses.dataclass(frozen=True)
class Stage:
  """One stage of a run.

  ``identity`` is what must be equal for its checkpoints to be of use: settings and data.
  """

  name: str  # of its metrics: sft, critic
  title: str  # for people
  folder: Path
  total: int  # updates
  identity: Mapping[str, Any]


def differences(
  saved: Mapping[str, Any], now: Mapping[str, Any], *, only_now: bool = False
) -> list[str]:
  """``policy.lr: 0.001 in the checkpoint, 0.002 now`` for each entry that is not the same.

  A setting that the program did not have yet when it saved had what is now its default.  With
  ``only_now`` entries that ``now`` lacks are not compared.
  """
  missing = "absent"
  defaults = {name: value for name, value in plain(dict(leaves(Config()))).items() if name in now}
  saved = defaults | dict(saved)
  return [
    f"{name}: {saved.get(name, missing)!r} in the checkpoint, {now.get(name, missing)!r} now"
    for name in sorted(set(now) if only_now else set(saved) | set(now))
    if saved.get(name, missing) != now.get(name, missing)
  ]


def refuse_changes(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Raises ConfigError listing what differs between a checkpoint's identity and the run's."""
  if changed := differences(saved, now):
    raise ConfigError(
      f"{folder} holds a run that this configuration would not continue:\n  "
      + "\n  ".join(changed)
      + "\nGo on with the settings of the checkpoint, choose another folder with --config.run_dir=…, or "
      "start over with --fresh (the old folder is kept under another name)."
    )


def restore_matching(
  checkpoints: Checkpoints, folder: Path, identity: Mapping[str, Any], targets: Mapping[str, Any]
) -> Saved | None:
  """The newest good checkpoint, which must be one that ``identity`` would go on from.

  Asked before the arrays are read, so that another model is told by its settings and not by its
  shapes; and of what was read, which is an older one where the newest is damaged.
  """
  meta = checkpoints.read_meta()
  if meta is not None:
    refuse_changes(folder, meta["identity"], identity)
  saved = checkpoints.restore(targets)
  if saved is not None:
    refuse_changes(folder, saved.meta["identity"], identity)
  return saved


@contextlib.contextmanager
def refusals() -> Iterator[None]:
  """What the set-up refuses (files, tokenizers, weights) is a fault of the configuration."""
  try:
    yield
  except (ValueError, OSError, WeightsUnavailable) as error:
    raise ConfigError(str(error)) from error


def run_stage(
  stage: Stage,
  config: Config,
  state: ModelState,
  update: Callable[[ModelState, int], tuple[ModelState, dict[str, Any]]],
  stop: Preemption,
  report: Callable[[str], None],
) -> ModelState:
  """The stage's last state: taken from the disk where an earlier run finished it, else trained."""
  folder = stage.folder
  with Checkpoints(
    folder / "checkpoints", config.checkpoint, config.checkpoint.stage_every, report
  ) as checkpoints:
    saved = restore_matching(checkpoints, folder, stage.identity, {"state": state})
    if saved is not None and saved.meta["finished"]:
      report(f"{stage.title}: finished before, {saved.step} updates, taken from {folder}")
      return saved.trees["state"]
    resume = saved.step if saved else None
    with Writer(folder, resume_step=resume, tensorboard=config.tensorboard) as writer:
      return train_stage(stage, checkpoints, state, update, writer, stop, saved)


def train_stage(
  stage: Stage,
  checkpoints: Checkpoints,
  state: ModelState,
  update: Callable[[ModelState, int], tuple[ModelState, dict[str, Any]]],
  writer: Writer,
  stop: Preemption,
  saved: Saved | None,
) -> ModelState:
  """Runs updates ``saved.step`` (or 0) to ``stage.total`` and saves the last one.

  Args:
    stage: see there.
    checkpoints: of the stage.
    state: fresh; ``saved`` wins.
    update: (state, index) → (state, metrics); everything random depends on the index only.
    writer: of the stage's folder.
    stop: asked between two updates.
    saved: what was restored.

  Raises:
    Preempted: the run was asked to stop; the last update is saved.
    NonFinite: an update was rejected.
  """

  def save(done: int) -> None:
    writer.sync()  # before the checkpoint, so that no line of its steps can be missing
    meta = {"identity": dict(stage.identity), "finished": done == stage.total}
    checkpoints.save(done, {"state": state}, meta)

  done = 0
  if saved is not None:
    done, state = saved.step, saved.trees["state"]
  with writer.progress(stage.title, stage.total) as progress:
    while done < stage.total:
      state, metrics = update(state, done)
      done += 1
      writer.hold(done, metrics)
      progress.update(done, metrics)
      if done % CHECK_EVERY == 0 or done == stage.total:
        require_finite(metrics, stage.name, f"{stage.title}, update {done}")
      last = done == stage.total
      if checkpoints.due(done) or last or stop.requested.is_set():
        save(done)
      if stop.requested.is_set() and not last:
        checkpoints.require(done)
        raise Preempted(f"{stage.title}, update {done} of {stage.total}")
  checkpoints.require(stage.total)
  return state
