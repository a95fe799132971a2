"""Are two formulas the same?  By value where that decides, else by sympy in a process of its own.

sympy can spin in C beyond the reach of signals, so it runs where it can be killed from outside,
with limits on time and memory; nothing else waits for it.
"""

import cmath
import json
import logging
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction

from sao_jax.envs.formula import FormulaError, Tree, names, symbols, value

log = logging.getLogger(__name__)

SECONDS = 10.0
_TOLERANCE = 1e-9
_POINTS = 5
_REAL_POINTS = 12
_slots = threading.Semaphore(2)

_WORKER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
if sys.platform != "darwin":
  resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
import sympy as S
F = {"ln": S.log, "log": S.log, "abs": S.Abs, "arcsin": S.asin, "arccos": S.acos,
     "arctan": S.atan, "binom": S.binomial, "root": S.real_root}
C = {"pi": S.pi, "e": S.E, "i": S.I, "infty": S.oo}
def build(t):
  head, rest = t[0], t[1:]
  if head == "num": return S.Rational(rest[0])
  if head == "sym": return C.get(rest[0]) or S.Symbol(rest[0])
  if head == "fn":
    return (F.get(rest[0]) or getattr(S, rest[0]))(*map(build, rest[1:]))
  a = [build(x) for x in rest]
  if head == "neg": return -a[0]
  return {"+": lambda: a[0] + a[1], "-": lambda: a[0] - a[1], "*": lambda: a[0] * a[1],
          "/": lambda: a[0] / a[1], "^": lambda: a[0] ** a[1]}[head]()
a, b = map(build, json.load(sys.stdin))
if a.has(S.oo, -S.oo, S.zoo, S.nan) or b.has(S.oo, -S.oo, S.zoo, S.nan):
  print(False)  # 1/0 and 2/0 are one symbol to sympy, and no value
else:
  print(a == b or S.simplify(a - b) == 0)
"""


def same(a: Tree, b: Tree, seconds: float = SECONDS) -> bool:
  """Whether two formulas are equal for all values of their symbols.

  Equal rationals are compared exactly (0.333 is not 1/3), all else to a relative 1e-9.  Symbols
  take fixed random real values of either sign, and formulas are compared where both are real, so
  sqrt(x^2) is |x| and not x, and ln(ab) is ln a + ln b.  Where they never are, symbols take complex
  values.  With an i in a formula all its values count.  Infinity is the same as infinity of
  the same sign alone.  Where formulas have no value, sympy decides within ``seconds``, the wait for
  its turn included; undecided is not the same.
  """
  try:
    if a == b:
      return True
    decided = _by_value(a, b)
    return _by_sympy(a, b, seconds) if decided is None else decided
  except RecursionError:  # a tree deeper than those that ``parse`` returns
    return False


def _infinity(tree: Tree) -> int:
  """1 for infinity, -1 for minus infinity, 0 for all else."""
  if tree[0] == "neg":
    return -_infinity(tree[1])
  return int(tree == ("sym", "infty"))


def _by_value(a: Tree, b: Tree) -> bool | None:
  if "infty" in names(a) | names(b):  # sums and products with it are nothing that compares
    return _infinity(a) == _infinity(b) != 0
  free, imaginary = symbols(a) | symbols(b), "i" in names(a) | names(b)
  points = _real_points(free, far=not (_exponential(a) or _exponential(b)))
  found = _at_points(a, b, points, real=not imaginary)
  return _at_points(a, b, _complex_points(free), real=False) if found is None else found


def _real_points(free: set[str], *, far: bool) -> list[dict[str, Fraction | complex]]:
  """All positive, all negative, then of any signs; up to 12, ``far`` up to 100."""
  ranges = [(20, 160), (160, 768), (768, 6400)][: 3 if far else 2]  # 64ths: exact as floats too
  rng = random.Random(0)
  points: list[dict[str, Fraction | complex]] = []
  for i in range(_REAL_POINTS if free else 1):
    low, high = ranges[i // 2 % len(ranges)]
    signs = {0: (1,), 1: (-1,)}.get(i, (1, -1))
    points.append(
      {n: Fraction(rng.choice(signs) * rng.randint(low, high), 64) for n in sorted(free)}
    )
  return points


def _complex_points(free: set[str]) -> list[dict[str, Fraction | complex]]:
  rng = random.Random(0)
  return [
    {n: complex(rng.uniform(0.3, 2.5), rng.uniform(-0.5, 0.5)) for n in sorted(free)}
    for _ in range(_POINTS if free else 1)
  ]


def _at_points(
  a: Tree, b: Tree, points: list[dict[str, Fraction | complex]], *, real: bool
) -> bool | None:
  """Whether two formulas agree at all points where both have a value; None if at no point."""
  agreed = False
  # Who writes |x| means negative x as well: ln |x| is not ln x.
  strict = real and (_has_abs(a) != _has_abs(b))
  for point in points:
    x, y = _value_at(a, point, real=real), _value_at(b, point, real=real)
    if strict and (x is None) != (y is None):
      one, other = _value_at(a, point, real=False), _value_at(b, point, real=False)
      if one is not None and other is not None and not _close(one, other):
        return False
    if x is None or y is None:
      continue
    if not _close(x, y):
      return False
    agreed = True
  return True if agreed else None


def _value_at(
  tree: Tree, point: dict[str, Fraction | complex], *, real: bool
) -> Fraction | complex | None:
  try:
    found = value(tree, point, real=real)
    if point or isinstance(found, complex):
      z = complex(found)
      # Past the floats: what overflows is not equal for that.
      return found if cmath.isfinite(z) and math.isfinite(abs(z)) else None
  except (FormulaError, OverflowError):
    return None
  return found


def _close(x: Fraction | complex, y: Fraction | complex) -> bool:
  if isinstance(x, Fraction) and isinstance(y, Fraction):
    return x == y
  x, y = complex(x), complex(y)
  return x == y or abs(x - y) <= _TOLERANCE * max(abs(x), abs(y))


def _nodes(tree: Tree) -> Iterator[Tree]:
  left = [tree]
  while left:
    node = left.pop()
    yield node
    left += [t for t in node[1:] if isinstance(t, tuple)]


def _has_abs(tree: Tree) -> bool:
  return any(node[:2] == ("fn", "abs") for node in _nodes(tree))


def _exponential(tree: Tree) -> bool:
  """Whether differences far from 0 may drown in rounding, as in (e^x + 1)^2 - e^(2x)."""
  return any(
    node[:2] in (("fn", "exp"), ("fn", "ln"), ("fn", "log"))
    or (node[0] == "^" and symbols(node[2]))
    for node in _nodes(tree)
  )


def _by_sympy(a: Tree, b: Tree, seconds: float) -> bool:
  command = [sys.executable, "-I", "-c", _WORKER]
  deadline = time.monotonic() + seconds
  if seconds <= 0 or not _slots.acquire(timeout=seconds):
    log.info("sympy had no turn within %.1f s: %s, %s", seconds, a, b)
    return False
  try:
    left = max(deadline - time.monotonic(), 0.0)
    text = json.dumps([a, b]).encode()
    done = subprocess.run(command, input=text, capture_output=True, timeout=left)
  except subprocess.TimeoutExpired:
    log.info("sympy did not decide within %.1f s: %s, %s", seconds, a, b)
    return False
  finally:
    _slots.release()
  if b"No module named 'sympy'" in done.stderr:
    log.warning("sympy is not installed: a formula without a numeric value is graded as different")
  return done.stdout.strip() == b"True"
