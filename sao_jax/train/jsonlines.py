"""Files of one JSON object a line that survive a kill and can be cut back to a checkpoint."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sao_jax.outcome import RunFailed

Row = dict[str, Any]


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
  """The rows of a file; a last line cut short by a kill is left out.

  Raises RunFailed naming file and line for one that holds no object.
  """
  lines = Path(path).read_bytes().split(b"\n")
  complete = lines[:-1]  # what follows the last newline is empty, or cut short
  return [_row(line, path, number) for number, line in enumerate(complete, 1)]


def _row(line: bytes, path: str | os.PathLike[str], number: int) -> Row:
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    row = None
  if not isinstance(row, dict):
    raise RunFailed(
      f"{path}, line {number}: {line[:60]!r} is no JSON object: restore the file from a backup, or "
      "remove the line"
    )
  return row


def read_steps(path: str | os.PathLike[str]) -> list[Row]:
  """``read_rows`` of a file whose rows have a ``step``; raises RunFailed naming one that has none."""
  rows = read_rows(path)
  for number, row in enumerate(rows, 1):
    if not isinstance(row.get("step"), int):
      raise RunFailed(
        f"{path}, line {number}: has no step: restore the file from a backup, or remove the line"
      )
  return rows


def encode(row: Mapping[str, Any]) -> str:
  return json.dumps(row, allow_nan=False, default=str, ensure_ascii=False) + "\n"


def write_whole(path: Path, content: str | bytes) -> None:
  """Writes a file such that it has either its old or its new content, also after a power cut."""
  temporary = path.with_name(path.name + ".tmp")
  try:
    with temporary.open("wb") as file:
      file.write(content.encode() if isinstance(content, str) else content)
      file.flush()
      os.fsync(file.fileno())
  except OSError:
    temporary.unlink(missing_ok=True)
    raise
  temporary.replace(path)


class JsonLines:
  """Rows with a ``step``, appended in order; a context manager.

  Args:
    path: the file; what is in it stays.
    resume_step: rows of later steps are taken back first, so that a resumed run writes each step
      once.  None starts over.
  """

  def __init__(self, path: Path, resume_step: int | None = None) -> None:
    rows = read_steps(path) if resume_step is not None and path.exists() else []
    kept = [row for row in rows if row["step"] <= (resume_step or 0)]
    write_whole(path, "".join(map(encode, kept)))
    self._file = path.open("a", encoding="utf-8")

  def write(self, row: Mapping[str, Any]) -> None:
    self._file.write(encode(row))

  def sync(self) -> None:
    """On return, what was written survives a kill and a power cut."""
    if not self._file.closed:
      self._file.flush()
      os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()

  def __enter__(self) -> "JsonLines":
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()
