"""Checkpoints: one atomic unit per step, written in the background, verified when read.

A step's folder holds everything that a resumed run needs: each model with its optimizer state, JSON
(versions, serials, accounting, the configuration), and finished episodes that wait for training.
Orbax writes it under a temporary name and renames it when it is complete, so a kill leaves the one
before; beside it, ``<step>.sha256`` lists the digest of every file, so that damage is seen before it
is trained on.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from sao_jax.config import CheckpointConfig
from sao_jax.outcome import RunFailed, one_line, out_of_room
from sao_jax.train.jsonlines import write_whole

log = logging.getLogger(__name__)

BLOB, META = "blob", "meta"


class CheckpointError(RunFailed):
  """Checkpoints are there and none can be used, or one that must be written could not be."""


class Damage(Exception):
  """Files of a checkpoint are missing, or not as they were written."""


class Saved(NamedTuple):
  """What a checkpoint held."""

  step: int
  trees: dict[str, Any]  # as the targets of restore
  meta: dict[str, Any]
  blob: bytes


class Checkpoints:
  """The checkpoints of one stage; a context manager, which waits for the last write when left.

  Args:
    folder: where they are.
    config: reads ``keep`` and ``keep_every``.
    every: steps between saves.
    report: gets a line for what a person should know (a failed write, a damaged checkpoint).
    read_only: leaves the folder as it is: a run may be writing to it.
  """

  def __init__(
    self,
    folder: Path,
    config: CheckpointConfig,
    every: int,
    report: Callable[[str], None] = print,
    *,
    read_only: bool = False,
  ) -> None:
    self._read_only = read_only
    self.folder, self.every, self._report = folder.absolute(), every, report
    self._writing: tuple[int, threading.Thread] | None = None
    self._error: Exception | None = None  # of the write under way
    self.failure: str = ""  # why the last write failed
    self._full = False  # for want of room
    if not read_only:
      self.folder.mkdir(parents=True, exist_ok=True)
    self._keep, self._keep_every = config.keep, config.keep_every
    self._manager = self._open()

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=self._keep,
        keep_period=self._keep_every or None,
        create=not self._read_only,
        read_only=self._read_only,
        # What a kill left half written is never restored; what a living run writes is not ours.
        cleanup_tmp_directories=not self._read_only,
        save_root_metadata=False,
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    self.wait()
    self._manager.close()

  # --- Writing ---

  def due(self, step: int) -> bool:
    """Whether to save now; asked after every step, it also reports a write that has failed."""
    if self._writing is not None and not self._writing[1].is_alive():
      self.wait()
    return step % self.every == 0

  def steps(self) -> list[int]:
    """Complete checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def save(
    self, step: int, trees: Mapping[str, Any], meta: Mapping[str, Any], blob: bytes = b""
  ) -> None:
    """Starts to write a checkpoint; the arrays may be donated as soon as this returns.

    A write that fails (a full disk) is reported, kept in ``failure``, and leaves the checkpoint
    before it as it was; the run may go on.
    """
    self.wait()
    if step in self.steps():
      return
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(
          **{name: ocp.args.StandardSave(_flat(tree)) for name, tree in trees.items()},
          **{BLOB: ocp.args.StandardSave({BLOB: np.frombuffer(blob or b"\0", np.uint8)})},
          **{META: ocp.args.JsonSave({**meta, "blob_bytes": len(blob)})},
        ),
      )
    except Exception as error:
      self._failed(step, error)
      return
    seal = threading.Thread(target=self._seal, args=(step,), name=f"checkpoint-{step}", daemon=True)
    self._writing = step, seal
    seal.start()

  def _seal(self, step: int) -> None:
    """Writes the digests as soon as the checkpoint is complete: a kill leaves little time between."""
    try:
      self._manager.wait_until_finished()
      if step not in self._manager.all_steps():
        raise OSError("the checkpoint is not there after its write")
      self._write_manifest(step)
    except Exception as error:
      self._error = error

  def _write_manifest(self, step: int) -> None:
    write_whole(self._manifest(step), json.dumps(_digests(self._step_folder(step)), indent=1))

  def wait(self) -> None:
    """Until the write under way is complete, or has failed."""
    if self._writing is None:
      return
    (step, seal), self._writing = self._writing, None
    seal.join()
    error, self._error = self._error, None
    if error is None:
      self.failure = ""
    else:
      self._failed(step, error)
    self._drop_manifests()

  def require(self, step: int) -> None:
    """Waits, and raises CheckpointError naming the cause if ``step`` is not on the disk."""
    self.wait()
    if step not in self.steps():
      last = self.steps()
      raise CheckpointError(
        f"the checkpoint of step {step} could not be written to {self.folder}: {self.failure}. "
        + ("Make room and run" if self._full else "Once that is mended, run")
        + " the same command: it "
        + (f"goes on from step {last[-1]}." if last else "starts over: no checkpoint is before it.")
      )

  def _failed(self, step: int, error: Exception) -> None:
    self.failure, self._full = one_line(error), out_of_room(error)
    self._report(f"checkpoint of step {step} failed: {self.failure}; the ones before it are intact")
    # The manager remembers the failed step and would wait for it: a new one starts from the disk.
    try:
      self._manager.close()
    except Exception:
      log.debug("closing the failed checkpoint manager", exc_info=True)
    self._manager = self._open()

  # --- Reading ---

  def restore(self, targets: Mapping[str, Any], step: int | None = None) -> Saved | None:
    """The newest checkpoint that can be read (or that of ``step``), or None if there is none at all.

    A damaged one is named, put aside as ``damaged-<step>``, and the one before it is taken.

    Args:
      targets: for each tree its structure, as arrays or ShapeDtypeStructs; arrays come back with
        their dtypes and shardings, whatever mesh they were saved from.

    Raises:
      CheckpointError: there are checkpoints, and every one is damaged, or does not fit, or the
        system could not read it: then nothing is put aside.
    """
    found = self.steps() if step is None else [step]
    for number in reversed(found):
      try:
        sealed = self._verify(number)
        saved = self._read(number, targets, sealed)
      except Damage as error:
        self._put_aside(number, error)
        continue
      if not sealed and not self._read_only:
        self._write_manifest(number)
      return saved
    if step is not None:
      raise CheckpointError(f"the checkpoint of step {step} in {self.folder} is damaged")
    self.refuse_if_all_damaged()
    return None

  def refuse_if_all_damaged(self) -> None:
    """Raises CheckpointError where damaged checkpoints were put aside and no other is left.

    A new start must not take such a folder for one in which nothing was done yet.
    """
    aside = sorted(p.name for p in self.folder.glob("damaged-*"))
    if aside and not self.steps():
      raise CheckpointError(
        f"every checkpoint in {self.folder} is damaged ({', '.join(aside)}). Restore the folder from a "
        "backup, or start over with --fresh."
      )

  def read_meta(self, step: int | None = None) -> dict[str, Any] | None:
    """The JSON part of a checkpoint (the newest), or None where there is none."""
    if step is None:
      found = self.steps()
      step = found[-1] if found else None
    if step is None:
      return None
    try:
      args = ocp.args.Composite(**{META: ocp.args.JsonRestore()})
      return self._manager.restore(step, args=args)[META]
    except Exception as error:
      log.debug("reading the meta data of step %d: %s", step, error)
      return None

  def _read(self, step: int, targets: Mapping[str, Any], sealed: bool) -> Saved:
    """Of files as they were written, it is the reader that does not fit; else they may be damaged."""
    try:
      return self._restored(step, targets)
    except Exception as error:
      if not sealed and not isinstance(error, OSError | MemoryError):
        raise Damage(one_line(error)) from error
      raise CheckpointError(
        f"the checkpoint of step {step} in {self.folder} "
        + ("is intact, but does not fit" if sealed else "could not be read for")
        + f" this model or version of the program: {one_line(error)}"
      ) from error

  def _restored(self, step: int, targets: Mapping[str, Any]) -> Saved:
    args = ocp.args.Composite(**{META: ocp.args.JsonRestore()})
    meta = self._manager.restore(step, args=args)[META]
    size = max(meta["blob_bytes"], 1)
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        **{name: ocp.args.StandardRestore(_flat(tree)) for name, tree in targets.items()},
        **{BLOB: ocp.args.StandardRestore({BLOB: np.zeros(size, np.uint8)})},
      ),
    )
    trees = {name: _unflat(restored[name], tree) for name, tree in targets.items()}
    return Saved(step, trees, meta, restored[BLOB][BLOB].tobytes()[: meta["blob_bytes"]])

  def _verify(self, step: int) -> bool:
    """Raises Damage naming the first file that is not as it was written; False if nobody can tell."""
    try:
      expected = json.loads(self._manifest(step).read_text())
    except (FileNotFoundError, ValueError):
      expected = None
    if not isinstance(expected, dict):
      return False  # killed just before it was written, or damaged itself
    try:
      actual = _digests(self._step_folder(step))
    except OSError as error:
      # An error of the system, now: another time the checkpoint may be read.
      raise CheckpointError(
        f"the checkpoint of step {step} in {self.folder} could not be read: {one_line(error)}"
      ) from error
    for name, digest in expected.items():
      if actual.get(name) != digest:
        what = "is missing" if name not in actual else "is not as it was written"
        raise Damage(f"{name} {what}")
    return True

  def _put_aside(self, step: int, error: Exception) -> None:
    if self._read_only:
      self._report(
        f"checkpoint of step {step} is damaged ({one_line(error)}): taking the one before"
      )
      return
    aside = self.folder / f"damaged-{step}"
    self._report(
      f"checkpoint of step {step} is damaged ({one_line(error)}): put aside as {aside.name}, going back "
      "to the one before"
    )
    self._manager.close()
    shutil.rmtree(aside, ignore_errors=True)
    self._step_folder(step).rename(aside)
    self._manifest(step).unlink(missing_ok=True)
    self._manager = self._open()

  def _step_folder(self, step: int) -> Path:
    return self.folder / str(step)

  def _manifest(self, step: int) -> Path:
    return self.folder / f"{step}.sha256"

  def _drop_manifests(self) -> None:
    steps = set(self.steps())
    for path in self.folder.glob("*.sha256"):
      if path.stem.isdigit() and int(path.stem) not in steps:
        path.unlink(missing_ok=True)


def next_incarnation(folder: Path, at_least: int = 0) -> int:
  """A number larger than that of any start before, on the disk before this returns.

  Every start of a trainer takes one before it publishes weights, so that (incarnation, step) never
  goes back, however often a run is killed.  ``at_least`` is what a checkpoint says, should the file
  be lost.
  """
  path = folder / "incarnation"
  text = path.read_text().strip() if path.exists() else ""
  number = max(int(text) if text.isdecimal() else 0, at_least) + 1
  folder.mkdir(parents=True, exist_ok=True)
  write_whole(path, str(number))
  return number


def _flat(tree: Any) -> dict[str, Any]:
  """{"params/layers/ffn/w_down": array, …}: names that no library version changes."""
  return {
    "/".join(_key(key) for key in path): leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def _key(key: Any) -> str:
  for attribute in ("name", "key", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def _unflat(flat: Mapping[str, Any], like: Any) -> Any:
  return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in _flat(like)])


def _digests(folder: Path) -> dict[str, str]:
  found = {}
  for root, _, files in os.walk(folder):
    for name in files:
      path = Path(root) / name
      with path.open("rb") as file:
        found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
  return found
