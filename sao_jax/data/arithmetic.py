"""Generated problems: expressions, sums, a mix of operations, and word problems.

Each is (question, expression, answer): the question is what the model reads, the expression is what
a calculator needs, the answer is an integer as text.
"""

import itertools
import random
import re
from typing import NamedTuple

from sao_jax.config import TaskConfig


class Problem(NamedTuple):
  question: str
  expression: str
  answer: str


_NAMES = ("tom", "ana", "ben", "eva", "max", "lia", "sam", "mia", "leo", "zoe")
_OBJECTS = ("apples", "books", "coins", "shells", "stamps", "cards", "eggs", "pens")
_GAIN = ("buys {n} more", "finds {n} more", "gets {n} more from a friend", "wins {n} more")
_LOSS = ("gives away {n}", "loses {n}", "sells {n}", "breaks {n}")
_TIMES = {2: "doubles them", 3: "triples them"}


def expression(rng: random.Random, terms: int, digits: int) -> Problem:
  """``terms`` numbers of at most ``digits`` digits with + - *; factors after a * have one digit."""
  text = ""
  for i in range(terms):
    width = 1 if text.endswith("*") else digits
    text += str(rng.randrange(1, 10**width))
    if i < terms - 1:
      text += rng.choice("+-*")
  return Problem(text, text, str(sum_of_products(text)))


def sum_of_products(text: str) -> int:
  """The value of an expression of integers, + - and *, without parentheses."""
  total = 0
  for term in re.findall(r"[+-]?[^+-]+", text):
    sign, factors = (-1, term[1:]) if term[0] == "-" else (1, term.lstrip("+"))
    for factor in factors.split("*"):
      sign *= int(factor)
    total += sign
  return total


def word_problem(rng: random.Random, steps: int, digits: int) -> Problem:
  """A short story in ``steps`` steps; lower case and without other signs than . and ?."""
  name, things = rng.choice(_NAMES), rng.choice(_OBJECTS)
  count = rng.randrange(2, 10**digits)
  story, text = [f"{name} has {count} {things}."], str(count)
  for i in range(steps):
    n = rng.randrange(1, 10**digits)
    kind = rng.choice("+-*")
    if kind == "-" and n >= count:
      kind = "+"
    if kind == "*":
      n = rng.choice(tuple(_TIMES))
      phrase, count = _TIMES[n], count * n
      text = f"({text})*{n}" if i and text[-2:-1] != "*" else f"{text}*{n}"
    elif kind == "-":
      phrase, count, text = rng.choice(_LOSS).format(n=n), count - n, f"{text}-{n}"
    else:
      phrase, count, text = rng.choice(_GAIN).format(n=n), count + n, f"{text}+{n}"
    story.append(f"{'then ' if i else ''}{name} {phrase}.")
  question = " ".join([*story, f"how many {things} now?"])
  return Problem(question, text, str(count))


def pools(config: TaskConfig) -> list[list[Problem]]:
  """All problems of a small space, by operation: ``a + b`` (sum), ``a op b`` (mix)."""
  if config.kind == "sum":
    if not 1 <= config.digits <= 3:
      raise ValueError(f"task.digits = {config.digits}: sums are listed for 1, 2 or 3 digits")
    numbers = range(10 ** (config.digits - 1), 10**config.digits)
    return [[_binary(a, "+", b) for a, b in itertools.product(numbers, numbers)]]
  small, factors = range(1, 31), range(2, 13)
  return [
    [_binary(a, "+", b) for a, b in itertools.product(small, small)],
    [_binary(a, "-", b) for a, b in itertools.product(small, small) if a >= b],
    [_binary(a, "*", b) for a, b in itertools.product(factors, factors)],
  ]


def _binary(a: int, operator: str, b: int) -> Problem:
  value = {"+": a + b, "-": a - b, "*": a * b}[operator]
  return Problem(f"{a} {operator} {b}", f"{a}{operator}{b}", str(value))
