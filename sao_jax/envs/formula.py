r"""LaTeX and plain formulas as trees, and their values.

A tree is a nested tuple: ``("num", "3/2")``, ``("sym", "x")``, ``("neg", a)``, ``("+", a, b)``
(also ``- * / ^``) and ``("fn", "sqrt", a)``.  Nothing is passed to ``eval``; sizes are bounded.

Two or three letters side by side are a product (``xy`` is x times y, in any order); four or more
are one name in any case, so that words in a formula are not equal to their anagrams.
"""

import cmath
import math
import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]

MAX_CHARACTERS = 600
_MAX_DEPTH = 60
_MAX_HEIGHT = 200  # of a tree: chains such as 1+1+1 grow it too, and values are found recursively
_LONGEST_PRODUCT = 3  # letters side by side
_MAX_BITS = 4096
_MAX_FRACTION_BITS = 4 * _MAX_BITS  # of operands: what powers make grows on in sums and products
_ROUNDING = 1e-15  # an imaginary part below this, relative, is rounding
_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j, "infty": complex(math.inf)}
_ARCS = {"arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan}
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "abs", *_ARCS}
_NO_ARGUMENT = {*_FUNCTIONS, "frac", "binom", "i"}  # \sin 2 i is i times a real number
KNOWN = frozenset({*_FUNCTIONS, "pi", "frac", "binom", "infty"})
_TOKEN = re.compile(r"\s*(?:(\d+\.\d*|\.\d+|\d+)|\\?([a-zA-Z]+)|(\*\*|[-+*/^_(){}\[\]|!,°]))")
_OPEN = {"(": ")", "{": "}", "[": "]", "|": "|"}
_NAMES = {"cdot": "*", "times": "*", "div": "/", "plus": "+", "minus": "-"}
_PERIODIC = {"sin", "cos", "tan", "cot", "sec", "csc"}  # of an angle
# Relations and the like: as factors they would say the same from either side.
_NO_FACTORS = frozenset(
  "le ge ne lt gt in notin ni subset subseteq supset supseteq mod bmod pmod to mapsto mid nmid "
  "rightarrow leftarrow Rightarrow Leftarrow implies iff equiv approx sim cong perp parallel "
  "setminus ldots cdots dots".split()
)
_WORDS_FOR_NO_FACTORS = {"mod"}  # without a backslash "in" is a product of i and n, or a word
_TEXT_COMMANDS = {"text", "mbox", "textrm", "textbf", "textit"}


class FormulaError(ValueError):
  """Not a formula that this module reads, or one without a bounded value."""


def parse(text: str, words: frozenset[str] = frozenset()) -> Tree:
  """Reads a formula.  Multiplication may be left out; ``log`` is the natural logarithm.

  Args:
    text: the formula.
    words: runs of letters that are one name each, however short.

  Raises:
    FormulaError: the text is no formula, or too long or too deep.
  """
  if len(text) > MAX_CHARACTERS:
    raise FormulaError(f"{len(text)} characters, at most {MAX_CHARACTERS}")
  parser = _Parser(_tokens(text, words))
  tree = parser.sum(0)
  if parser.peek() is not None:
    raise FormulaError(f"unexpected {parser.peek()!r} in {text!r}")
  if (height := _height(tree)) > _MAX_HEIGHT:
    raise FormulaError(f"a tree of {height} levels, at most {_MAX_HEIGHT}")
  return tree


def _tokens(text: str, words: frozenset[str]) -> list[str]:
  tokens: list[str] = []
  at = 0
  text = text.strip()
  while at < len(text):
    match = _TOKEN.match(text, at)
    if match is None:
      raise FormulaError(f"unexpected {text[at]!r} in {text!r}")
    number, name, sign = match.groups()
    if name is not None:
      tokens += _split_name(name, words, command="\\" in match[0])
    else:
      tokens.append(number or ("^" if sign == "**" else sign))
    at = match.end()
  return tokens


def _split_name(name: str, words: frozenset[str], *, command: bool) -> list[str]:
  if command and name in _TEXT_COMMANDS:
    raise FormulaError(f"prose in a formula: \\{name}")
  if name in (_NO_FACTORS if command else _WORDS_FOR_NO_FACTORS):
    raise FormulaError(f"no factor: {name}")
  if name in _NAMES:
    return [_NAMES[name]]
  if command or name in KNOWN:
    return [name]
  if name in words or len(name) > _LONGEST_PRODUCT or (len(name) > 1 and name.lower() in KNOWN):
    return [name.lower()]
  return list(name)  # xy is x times y


class _Parser:
  def __init__(self, tokens: list[str]) -> None:
    self._tokens, self._at = tokens, 0
    self._angles = 0  # trigonometric functions whose argument is being read

  def peek(self) -> str | None:
    return self._tokens[self._at] if self._at < len(self._tokens) else None

  def _next(self) -> str:
    token = self.peek()
    if token is None:
      raise FormulaError("unexpected end")
    self._at += 1
    return token

  def _expect(self, token: str) -> None:
    if self._next() != token:
      raise FormulaError(f"expected {token!r}")

  def sum(self, depth: int) -> Tree:
    left = self._product(depth + 1)
    while self.peek() in ("+", "-"):
      left = (self._next(), left, self._product(depth + 1))
    return left

  def _product(self, depth: int) -> Tree:
    left = self._signed(depth)
    while (token := self.peek()) is not None:
      if token in ("*", "/"):
        left = (self._next(), left, self._signed(depth))
      elif token in ("+", "-", ",", "!", "^", ")", "]", "}", "|"):
        break
      else:
        left = ("*", left, self._power(depth))
    return left

  def _signed(self, depth: int) -> Tree:
    signs = 0
    while self.peek() in ("+", "-"):
      signs += self._next() == "-"
    tree = self._power(depth)
    return ("neg", tree) if signs % 2 else tree

  def _power(self, depth: int) -> Tree:
    base = self._atom(depth)
    while self.peek() == "!":
      self._next()
      base = ("fn", "factorial", base)
    if self.peek() == "°":
      self._next()
      if self._angles:  # elsewhere degrees are a unit
        base = ("*", base, ("/", ("sym", "pi"), ("num", "180")))
    if self.peek() == "^":
      self._next()
      sign = self.peek() == "-"
      if sign:
        self._next()
      exponent = self._power(depth + 1)
      return ("^", base, ("neg", exponent) if sign else exponent)
    return base

  def _atom(self, depth: int) -> Tree:
    if depth > _MAX_DEPTH:  # every descent comes through here
      raise FormulaError(f"more than {_MAX_DEPTH} levels")
    token = self._next()
    if token in _OPEN:
      inner = self.sum(depth + 1)
      self._expect(_OPEN[token])
      return ("fn", "abs", inner) if token == "|" else inner
    if token[0].isdigit() or token[0] == ".":
      return ("num", str(Fraction(token)))
    if token == "frac":
      return ("/", self._argument(depth), self._argument(depth))
    if token == "binom":
      return ("fn", "binom", self._argument(depth), self._argument(depth))
    if token == "sqrt" and self.peek() == "[":
      self._next()
      order = self.sum(depth + 1)
      self._expect("]")
      return ("fn", "root", self._argument(depth), order)
    if token in _FUNCTIONS:
      return self._function(token, depth)
    if token.isalpha():
      return ("sym", token)
    raise FormulaError(f"unexpected {token!r}")

  def _function(self, name: str, depth: int) -> Tree:
    if name == "sqrt":
      return ("fn", name, self._argument(depth))
    base = power = None
    if name == "log" and self.peek() == "_":  # \log_2 x
      self._next()
      base = self._argument(depth)
    if self.peek() == "^":  # \sin^2 x
      self._next()
      power = self._argument(depth)
    self._angles += name in _PERIODIC
    value: Tree = ("fn", name, self._unbracketed(depth + 1))
    self._angles -= name in _PERIODIC
    if base is not None:
      value = ("/", value, ("fn", name, base))
    return value if power is None else ("^", value, power)

  def _unbracketed(self, depth: int) -> Tree:
    r"""What a function without brackets takes: one factor, or a number and letters (\sin 2x)."""
    token = self.peek()
    tree = self._power(depth)
    if token is not None and (token[0].isdigit() or token[0] == "."):
      while (token := self.peek()) is not None and token.isalpha() and token not in _NO_ARGUMENT:
        tree = ("*", tree, self._power(depth))
    return tree

  def _argument(self, depth: int) -> Tree:
    r"""What \frac and \sqrt take: a group, or one digit or letter (\frac43)."""
    token = self.peek()
    if token is not None and token.isdigit() and len(token) > 1:
      self._tokens[self._at : self._at + 1] = list(token)
    return self._atom(depth + 1)


def _height(tree: Tree) -> int:
  height, level = 0, [tree]
  while level:
    height += 1
    level = [t for node in level for t in node[1:] if isinstance(t, tuple)]
  return height


def names(tree: Tree) -> set[str]:
  """All names in a tree, constants as well."""
  found, left = set(), [tree]
  while left:
    node = left.pop()
    if node[0] == "sym":
      found.add(node[1])
    left += [t for t in node[1:] if isinstance(t, tuple)]
  return found


def symbols(tree: Tree) -> set[str]:
  """Names that are no constants."""
  return names(tree) - {"pi", "e", "i", "infty"}


def value(
  tree: Tree, names: dict[str, Fraction | complex], *, real: bool = False
) -> Fraction | complex:
  """The value of a tree: exact where it is rational, else complex.

  Args:
    tree: what ``parse`` returns.
    names: the value of each symbol.
    real: refuse what leaves the real numbers on the way, such as the square root of -1.

  Raises:
    FormulaError: no bounded value there.
  """
  try:
    return _value(tree, names, real)
  except (ArithmeticError, ValueError) as error:
    raise FormulaError(f"no value: {error}") from None


def _value(tree: Tree, names: dict[str, Fraction | complex], real: bool) -> Fraction | complex:
  match tree:
    case ("num", text):
      return Fraction(text)
    case ("sym", name):
      return _CONSTANTS[name] if name in _CONSTANTS else names[name]
    case ("neg", a):
      return -_value(a, names, real)
    case ("fn", name, *arguments):
      result = _apply(name, *(_value(a, names, real) for a in arguments))
    case (operator, a, b):
      result = _binary(operator, _value(a, names, real), _value(b, names, real))
    case _:
      raise FormulaError(f"no formula: {tree!r}")
  if isinstance(result, complex):
    if real and not abs(result.imag) <= _ROUNDING * abs(result):
      raise FormulaError("not real")
    if abs(result.imag) <= _ROUNDING * abs(result):  # else a root may take the other side of a cut
      return complex(result.real)
  return result


def _binary(operator: str, a: Fraction | complex, b: Fraction | complex) -> Fraction | complex:
  if operator == "^":
    return _power_value(a, b)
  if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
    a, b = complex(a), complex(b)
  elif _bits(a) + _bits(b) > _MAX_FRACTION_BITS:
    raise FormulaError(f"more than {_MAX_FRACTION_BITS} bits")
  match operator:
    case "+":
      result = a + b
    case "-":
      result = a - b
    case "*":
      result = a * b
    case _:
      result = a / b
  return result


def _bits(number: Fraction) -> int:
  return max(number.numerator.bit_length(), number.denominator.bit_length())


def _power_value(a: Fraction | complex, b: Fraction | complex) -> Fraction | complex:
  if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
    if _bits(a) * abs(b) > _MAX_BITS:
      raise FormulaError(f"more than {_MAX_BITS} bits")
    return Fraction(a ** int(b))
  return complex(a) ** complex(b)


def _apply(name: str, *arguments: Fraction | complex) -> Fraction | complex:
  x = arguments[0]
  if name in ("factorial", "binom"):
    n = [int(v) for v in arguments if isinstance(v, Fraction) and v.denominator == 1]
    if len(n) != len(arguments) or min(n) < 0 or max(n) > 300:
      raise FormulaError(f"{name} of {arguments}")
    return Fraction(math.factorial(n[0]) if name == "factorial" else math.comb(*n))
  if name == "abs":
    return abs(x) if isinstance(x, Fraction) else complex(abs(x))
  if name == "root":
    return _root(x, arguments[1])
  z = complex(x)
  match name:
    case "ln" | "log":
      return cmath.log(z)
    case "cot":
      return 1 / cmath.tan(z)
    case "sec":
      return 1 / cmath.cos(z)
    case "csc":
      return 1 / cmath.sin(z)
    case "sqrt" | "sin" | "cos" | "tan" | "exp":
      return getattr(cmath, name)(z)
  return _ARCS[name](z)


def _root(x: Fraction | complex, order: Fraction | complex) -> Fraction | complex:
  """The principal root, save that an odd root of a negative number is negative."""
  z, n = complex(x), complex(order)
  odd = isinstance(order, Fraction) and order.denominator == 1 and order.numerator % 2 == 1
  if odd and z.imag == 0 and z.real < 0:
    return -((-z) ** (1 / n))
  return z ** (1 / n)
