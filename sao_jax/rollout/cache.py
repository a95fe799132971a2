"""Keys and values kept outside the slots: prefixes shared by prompts, episodes between turns.

How a prompt is cut decides the bits of its keys and values, so the cut depends on nothing but the
prompt: blocks end at 16, 32, 64, … and then every ``sizes[-1]`` tokens, whatever is found in the
cache.  A row found there is what this prompt would have computed itself, bit for bit.
"""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sao_jax.types import Version

SMALLEST_BUCKET = 16
LARGEST_BUCKET = 512
_SEEN = 4096  # prefixes remembered by hash only


@dataclass(frozen=True)
class Row:
  """Keys and values of ``tokens``, computed under ``version`` (its last part, with kv=keep)."""

  cache: Any
  tokens: np.ndarray
  version: Version

  @property
  def nbytes(self) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))


def bucket_sizes(max_len: int) -> tuple[int, ...]:
  """Lengths that a forward over several tokens is compiled for: 16, 32, … ≤ max_len, 512."""
  sizes = [SMALLEST_BUCKET]
  while 2 * sizes[-1] <= min(max_len, LARGEST_BUCKET) and 2 * sizes[-1] < max_len:
    sizes.append(2 * sizes[-1])
  return tuple(sizes)


def bucket(n: int, sizes: tuple[int, ...]) -> int:
  return next(size for size in sizes if size >= n)


def prompt_blocks(n: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
  """(start, stop) of the blocks in which the first n tokens of a prompt are processed."""
  start = 0
  while start < n:
    stop = min(start + min(max(start, sizes[0]), sizes[-1]), n)
    yield start, stop
    start = stop


def append_blocks(start: int, n: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
  """(start, stop) of the blocks in which tokens start … n − 1 are appended to a row."""
  for first in range(start, n, sizes[-1]):
    yield first, min(first + sizes[-1], n)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
  n = min(len(a), len(b))
  differ = np.flatnonzero(a[:n] != b[:n])
  return int(differ[0]) if len(differ) else n


class RowCache:
  """Least recently used rows within a budget of bytes; not thread-safe, the engine holds its lock.

  Prefixes are keyed by token ids *and* version whatever the kv policy, so no prompt ever starts
  from keys of other weights.  Rows of parked sessions are keyed by session.  Prefixes are dropped
  before sessions: a prefix costs only time, while a session that must be prefilled again gets keys
  that equal its old ones to rounding, not to the bit.
  """

  def __init__(self, budget_bytes: int) -> None:
    self.budget = budget_bytes
    self.nbytes = 0
    self.evicted_prefixes = 0
    self.evicted_sessions = 0
    self._prefixes: OrderedDict[bytes, Row] = OrderedDict()
    self._sessions: OrderedDict[str, Row] = OrderedDict()
    self._seen: OrderedDict[bytes, None] = OrderedDict()

  def find_prefix(self, ends: dict[int, bytes], version: Version) -> tuple[int, Row | None]:
    """The longest cached prefix that ends at one of ``ends`` (see ``prefix_ids``)."""
    for end in sorted(ends, reverse=True):
      row = self._prefixes.get(ends[end])
      if row is not None and row.version == version:
        self._prefixes.move_to_end(ends[end])
        return end, row
    return 0, None

  def worth_keeping(self, ends: dict[int, bytes]) -> int:
    """The longest end that an earlier prompt had too (0: none).  Remembers all of them."""
    shared = max((end for end, key in ends.items() if key in self._seen), default=0)
    for key in ends.values():
      self._seen[key] = None
      self._seen.move_to_end(key)
    while len(self._seen) > _SEEN:
      self._seen.popitem(last=False)
    return shared

  def put_prefix(self, key: bytes, row: Row) -> None:
    old = self._prefixes.pop(key, None)
    self.nbytes += row.nbytes - (old.nbytes if old else 0)
    self._prefixes[key] = row
    self._shrink()

  def park(self, session: str, row: Row) -> None:
    self.take(session)
    self._sessions[session] = row
    self.nbytes += row.nbytes
    self._shrink()

  def take(self, session: str) -> Row | None:
    """Removes and returns a parked row."""
    row = self._sessions.pop(session, None)
    if row is not None:
      self.nbytes -= row.nbytes
    return row

  def _shrink(self) -> None:
    while self.nbytes > self.budget:
      if self._prefixes:
        self.nbytes -= self._prefixes.popitem(last=False)[1].nbytes
        self.evicted_prefixes += 1
      else:
        self.nbytes -= self._sessions.popitem(last=False)[1].nbytes
        self.evicted_sessions += 1


class KeptRows:
  """Where the row of each session between two turns is: still in its slot, or in the RowCache.

  Not thread-safe, the engine holds its lock.  ``read`` gives the keys and values of a slot.
  """

  def __init__(self, cache: RowCache, read: Callable[[int], Any]) -> None:
    self.cache, self._read = cache, read
    self._resident: dict[str, tuple[int, Row]] = {}  # rows without arrays: those are in the slot
    self._owner: dict[int, str] = {}
    self.parked = 0

  def __len__(self) -> int:
    return len(self._resident)

  def leave(self, session: str, slot: int, tokens: np.ndarray, version: Version) -> None:
    """The session's request ended in ``slot``, which holds the keys and values of ``tokens``."""
    self.forget(session)
    self._resident[session] = slot, Row(None, tokens, version)
    self._owner[slot] = session

  def vacate(self, slot: int) -> None:
    """Another request takes the slot: a row that lies there is parked."""
    session = self._owner.pop(slot, None)
    if session is not None:
      _, row = self._resident.pop(session)
      self.cache.park(session, dataclasses.replace(row, cache=self._read(slot)))
      self.parked += 1

  def take(self, session: str) -> Row | None:
    """Removes and returns the session's row."""
    if session not in self._resident:
      return self.cache.take(session)
    slot, row = self._resident.pop(session)
    self._owner.pop(slot)
    return dataclasses.replace(row, cache=self._read(slot))

  def forget(self, session: str) -> None:
    if session in self._resident:
      slot, _ = self._resident.pop(session)
      self._owner.pop(slot)
    self.cache.take(session)


def prefix_ids(tokens: np.ndarray, sizes: tuple[int, ...]) -> dict[int, bytes]:
  """End of each block of a prompt → a hash of the tokens before it."""
  ids, running = {}, hashlib.blake2b(digest_size=16)
  for start, stop in prompt_blocks(len(tokens), sizes):
    running.update(np.ascontiguousarray(tokens[start:stop], np.int32).tobytes())
    ids[stop] = running.copy().digest()
  return ids
