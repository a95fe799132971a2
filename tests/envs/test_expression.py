"""The arithmetic evaluator against Python itself, and against what a hostile model would send."""

import ast
import operator
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.envs.expression import ExpressionError, evaluate

_leaf = st.integers(0, 999).map(str)
_expressions = st.recursive(
  _leaf,
  lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
    inner.map(lambda e: f"({e})"),
    inner.map(lambda e: f"-({e})"),
  ),
  max_leaves=8,
)


def _reference(node):
  """Integers by walking Python's own tree: a second implementation without bounds."""
  if isinstance(node, ast.Constant):
    return node.value
  if isinstance(node, ast.UnaryOp):
    return -_reference(node.operand)
  ops = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
  return ops[type(node.op)](_reference(node.left), _reference(node.right))


@settings(max_examples=100, deadline=None)
@given(_expressions)
def test_equals_python(text):
  assert evaluate(text) == _reference(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("12+3*4", 24),
    ("-(-3)**2", -9),
    ("2**-1", 0.5),
    ("7//2", 3),
    ("-7%3", 2),
    ("2**3**2", 512),
    ("print(3*4)", 12),
    (" 1_000 * 2\n", 2000),
    ("1e3", 1000.0),
    ("1**99999999", 1),
  ],
)
def test_values(text, value):
  assert evaluate(text) == value
  assert type(evaluate(text)) is type(value)


@pytest.mark.parametrize(
  "text",
  [
    "9**9**9",
    "9**9**9**9",
    "(2**2000)*(2**2000)*(2**2000)",
    "2.0**99999",
    "'x'*10**9",
    '"a"',
    "(1).bit_length()",
    "().__class__",
    "x",
    "__import__('os').system('true')",
    "print(1,2)",
    "print(print(1))",
    "abs(-1)",
    "[i for i in range(9)]",
    "{1:2}",
    "lambda: 1",
    "1 if 1 else 2",
    "1;2",
    "a:=1",
    "1<<999999999",
    "(-8)**0.5",
    "0**-1",
    "1//0",
    "1.0.real",
    "1j",
    "0x10",
    "True",
    "",
    "+" * 300 + "1",
    "-" * 300 + "1",
    "1" * 5000,
    "9" * 390 + "**9",
    "1+" * 5000 + "1",
    "12+3*4=",
    "1\x002",
  ],
)
def test_refuses_quickly(text):
  start = time.perf_counter()
  with pytest.raises(ExpressionError):
    evaluate(text)
  assert time.perf_counter() - start < 0.5


def test_errors_read_as_python_says_them():
  with pytest.raises(ExpressionError, match=r"^ZeroDivisionError: division by zero$"):
    evaluate("1/0")
  with pytest.raises(ExpressionError, match=r"^SyntaxError: invalid syntax$"):
    evaluate("12+")
