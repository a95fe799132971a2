"""Runs every ``tests/benchmarks/bench_*.py`` and prints one table.

Each bench module has ``rows(quick: bool) -> list[Row]``.  This file pins the process to one core and
every library to one thread before any of them is imported.  Peers (torch, transformers, verl,
tunix, numba) are optional: a row whose peer is missing shows our own figure and says so.
"""

import argparse
import importlib
import os
import pathlib
import sys

from sao_jax import memory

THREAD_VARIABLES = (
  "OMP_NUM_THREADS",
  "MKL_NUM_THREADS",
  "OPENBLAS_NUM_THREADS",
  "NUMEXPR_NUM_THREADS",
  "NUMBA_NUM_THREADS",
)


def pin_to_one_core(core: int | None) -> None:
  """Pins this process and all threads it will start; must run before jax and torch are imported."""
  early = sorted({"jax", "torch", "numpy"} & sys.modules.keys())
  if early:
    raise RuntimeError(f"{', '.join(early)} was imported before the process was pinned to one core")
  if hasattr(os, "sched_setaffinity"):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed) if core is None else core})
  for name in THREAD_VARIABLES:
    os.environ[name] = "1"
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def main() -> int:
  parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
  parser.add_argument("--only", action="append", help="bench_<name>.py to run (repeatable)")
  parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller shapes")
  parser.add_argument(
    "--peers-keep-memory",
    action="store_true",
    help="give the peers the allocator settings that sao-jax makes for itself (glibc)",
  )
  parser.add_argument("--core", type=int, help="which core (default: the first allowed one)")
  arguments = parser.parse_args()
  here = pathlib.Path(__file__).parent
  names = sorted(path.stem.removeprefix("bench_") for path in here.glob("bench_*.py"))
  unknown = sorted(set(arguments.only or ()) - set(names))
  if unknown:
    parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(names)}")
  pin_to_one_core(arguments.core)
  memory.keep_freed()  # as sao-jax does; harness.peer takes it back for the peers
  from tests.benchmarks import harness

  harness.peers_keep_memory = arguments.peers_keep_memory

  rows: list[harness.Row] = []
  for name in arguments.only or names:
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    print(f"running bench_{name} …", file=sys.stderr, flush=True)
    rows += module.rows(quick=arguments.quick)
  harness.print_rows(rows)
  return 1 if any(row.verdict == "FAIL" for row in rows) else 0


if __name__ == "__main__":
  sys.exit(main())
