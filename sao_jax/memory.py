"""What glibc does with freed memory; on other C libraries nothing is changed."""

import ctypes
import sys

KEEP_BELOW = 256 << 20  # bytes of a policy's parameters
LARGEST_MMAP_THRESHOLD = 32 << 20  # where glibc's own rule ends

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of malloc.h


def keep_freed() -> None:
  """Keeps what is freed for the next step, which asks for the same again.

  Else every large buffer of a step is mapped anew and zeroed page by page: a tenth of a small model's
  training step on CPU.  Must be called before threads start.
  """
  if libc := _glibc():
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_ARENA_MAX, 1)


def map_large_buffers() -> None:
  """glibc's own way again: a buffer above 32 MiB has its pages to itself and returns them."""
  if libc := _glibc():
    libc.mallopt(_MMAP_MAX, 65536)
    libc.mallopt(_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)


def give_back_freed() -> None:
  """The same, and returns what was kept so far.

  With buffers of hundreds of MiB the holes that kept memory leaves outweigh the time it saves:
  SmolLM2-135M as four experts takes 10 GiB so, and 18 with ``keep_freed``.
  """
  if libc := _glibc():
    map_large_buffers()
    libc.mallopt(_TRIM_THRESHOLD, 2 * LARGEST_MMAP_THRESHOLD)
    libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
  libc = ctypes.CDLL(None) if sys.platform == "linux" else None
  return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
