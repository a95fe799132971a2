"""Arithmetic by syntax tree: a small subset of Python that is safe to evaluate in this process.

Numbers, ``+ - * / // % **``, signs and parentheses, and ``print(…)`` around the whole.  No names,
calls, attributes, strings or comprehensions.  Length, depth, exponents and sizes are bounded, so
that neither time nor memory can grow with what a model writes.
"""

import ast
import operator
import re
from collections.abc import Callable

MAX_CHARACTERS = 400
MAX_DEPTH = 60
MAX_BITS = 4096  # of any integer on the way

_ALLOWED = re.compile(r"[0-9.+\-*/%()\s_]|(?<=[0-9.])[eE](?=[-+0-9])")
_PRINT = re.compile(r"\s*print(?=\s*\()")

_BINARY: dict[type[ast.operator], Callable] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
  """Not an arithmetic expression, or without a (bounded) value; the message is for the model."""


def evaluate(text: str) -> int | float:
  """The value of an arithmetic expression, as Python would compute it.

  Raises:
    ExpressionError: anything else than arithmetic, or a value beyond the bounds; the message names
      the reason as Python would (``ZeroDivisionError: division by zero``).
  """
  if len(text) > MAX_CHARACTERS:
    raise ExpressionError(f"SyntaxError: {len(text)} characters, at most {MAX_CHARACTERS}")
  body = _PRINT.sub("", text, count=1)
  if rest := _ALLOWED.sub("", body):
    raise ExpressionError(f"SyntaxError: only arithmetic is allowed, found {rest[0]!r}")
  try:
    tree = ast.parse(body.strip(), mode="eval")
    return _value(tree.body, MAX_DEPTH)
  except ExpressionError:
    raise
  except (SyntaxError, ArithmeticError) as error:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    raise ExpressionError(f"{type(error).__name__}: {message}") from None
  except (ValueError, MemoryError, RecursionError):
    raise ExpressionError("SyntaxError: expression too deep") from None


def _value(node: ast.expr, depth: int) -> int | float:
  if depth == 0:
    raise ExpressionError(f"SyntaxError: more than {MAX_DEPTH} levels")
  match node:
    case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
      return _bounded(value)
    case ast.UnaryOp(op=ast.UAdd(), operand=operand):
      return _value(operand, depth - 1)
    case ast.UnaryOp(op=ast.USub(), operand=operand):
      return -_value(operand, depth - 1)
    case ast.BinOp(left=left, op=ast.Pow(), right=right):
      return _power(_value(left, depth - 1), _value(right, depth - 1))
    case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
      return _bounded(_BINARY[type(op)](_value(left, depth - 1), _value(right, depth - 1)))
  raise ExpressionError(f"SyntaxError: {type(node).__name__} is not allowed, only arithmetic is")


def _power(base: int | float, exponent: int | float) -> int | float:
  whole = isinstance(base, int) and isinstance(exponent, int) and exponent > 0
  # Checked before it is computed: 9**9**9 would otherwise take the process with it.
  if whole and abs(base) > 1 and int(base).bit_length() * exponent > MAX_BITS:
    raise ExpressionError(f"OverflowError: more than {MAX_BITS} bits")
  result = base**exponent
  if isinstance(result, complex):
    raise ExpressionError("ValueError: root of a negative number")
  return _bounded(result)


def _bounded(value: int | float) -> int | float:
  if isinstance(value, int) and value.bit_length() > MAX_BITS:
    raise ExpressionError(f"OverflowError: more than {MAX_BITS} bits")
  return value
