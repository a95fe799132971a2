"""Files of one JSON object a line, ``.gz`` or not: the one way in which they are read."""

import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = 600  # characters of a message: what is wrong with a line may quote it


def read_lines(path: str, parse: Callable[[Any], T]) -> tuple[list[tuple[int, T]], str]:
  """(line number, parsed JSON) of each line that is not blank, and sha256 of the file's bytes.

  Raises ValueError, with file and line, for what is no JSON or what ``parse`` refuses so.
  """
  data = pathlib.Path(path).expanduser().read_bytes()
  fingerprint = hashlib.sha256(data).hexdigest()
  if path.endswith(".gz"):
    try:
      data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
      raise ValueError(f"{path} is no whole gzip file: {error}") from None
  rows = []
  # Split as bytes: str.splitlines would cut at characters that JSON may hold inside a string.
  for number, line in enumerate(data.split(b"\n"), 1):
    if not line.strip():
      continue
    try:
      rows.append((number, parse(_value(line))))
    except ValueError as error:
      text = str(error)
      text = text if len(text) <= _MOST else f"{text[:_MOST]}…"
      raise ValueError(f"{path}, line {number}: {text}") from None
  if not rows:
    raise ValueError(f"{path} is empty")
  return rows, fingerprint


def _value(line: bytes) -> Any:
  try:
    return json.loads(line.decode("utf-8-sig"))
  except UnicodeDecodeError as error:
    raise ValueError(
      f"byte {error.start + 1} (0x{line[error.start]:02x}) is no UTF-8, which the file must be"
    ) from None
  except RecursionError:
    raise ValueError("brackets inside brackets, too deep to be read") from None
