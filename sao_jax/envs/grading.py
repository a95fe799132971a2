r"""Is an answer right?  ``exact`` compares texts, ``math`` compares what they mean.

Nothing is evaluated as code.  ``math`` understands fractions, decimals, percent, thousands
separators, LaTeX (``\frac \sqrt \boxed \text \pm \cup`` and matrices), tuples, intervals, sets,
lists, equations, inequalities, units and words.

What follows a number is dropped where it is a unit (see ``units``) and kept where it is not:
``5 cm`` is 5, ``5 million`` is 5000000, and ``5 log x`` and ``5 thirds`` are not 5.  Degrees are a
unit, save within a trigonometric function: ``\cos 60^\circ`` is 1/2.

Letters are read as words or as a product:
  * what ``\text{…}`` holds is words, and so are four or more letters side by side;
  * a text of nothing but letters, spaces and numbers is words too (``HTH``, ``AB``, ``Row 3``),
    compared letter by letter, unless it is two lower-case letters without an o, which no formula
    uses for a variable: ``xy`` is ``yx``, ``no`` is not ``on``;
  * in a formula with operators up to three letters are a product: ``2abc`` is ``2cab``.

Case is kept, save that of words and of choices: ``x`` is not ``X``, ``Monday`` is ``monday``, and
``(b)`` is ``B``.

``1,200`` is a number or a list of two, whichever fits; within brackets it is a list, save where a
group starts with 0 (``1,000``) or other commas have space behind them (``(1,200, 5)``).
"""

import itertools
import re
import time
from typing import NamedTuple

from sao_jax.envs.formula import KNOWN, MAX_CHARACTERS, FormulaError, parse
from sao_jax.envs.spelling import TEXT, respelled
from sao_jax.envs.symbolic import SECONDS, same
from sao_jax.envs.units import drop_units
from sao_jax.latex import last_boxed

_RELATION = re.compile(r"\\(?:le|ge|ne)(?![a-zA-Z])|<|>")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}
_IN = re.compile(r"\\in(?![a-z])")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE](\d+|[+-]\d+)(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
_MIXED = re.compile(r"(?<![\d.^_}])(\d+)\s*\\frac\s*(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))")
_MIXED_PLAIN = re.compile(r"^(-?)(\d+) (\d+)/(\d+)$")
_MATRIX = re.compile(r"\\begin\{[pbv]matrix\}(.*?)\\end\{[pbv]matrix\}", re.S)
_NAMED = re.compile(
  r"^\s*(?:[a-zA-Z]|[a-zA-Z]\([a-z]\)|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega))\s*"
  r"(?:=|\\in(?![a-z]))\s*"
)
_LETTER = re.compile(r"^\(?([A-Za-z])\)?\.?$")
_CHOICE = re.compile(r"^\(?([A-Ha-h])\)\.?$")  # (B), B)
_SHORT_WORDS = {"no", "on", "so", "go", "do", "to", "or", "of", "up", "am", "pm", "is", "it", "us"}
_HEXADECIMAL = re.compile(r"[\dA-Fa-f]+_\{16\}")
_UNION = re.compile(r"\\cup(?![a-z])")
_COMMA = re.compile(r",(?:\s*(?:and|or)\s)?|\s(?:and|or)\s")
_PROSE = re.compile(r"\(?[A-Za-z\d\s]*\)?")
_FACTOR = re.compile(r"\d[A-Za-z]")  # 2xyz
_OPENING, _CLOSING = "([{⟨", ")]}⟩"
_LISTS, _LIST_ENDS = "([⟨", ")]⟩"  # a LaTeX group holds no list


class _Grade(NamedTuple):
  """What all comparisons of one grade share: one deadline, and what was written as text."""

  deadline: float
  words: frozenset[str]


class _Reading(NamedTuple):
  """One way to read an answer, and the measures (cm, h) that it names and that were dropped."""

  text: str
  measures: frozenset[str]

  def may_equal(self, other: "_Reading") -> bool:
    """5 cm is not 5 m; a bare number may be of any unit."""
    unlike = self.measures and other.measures and self.measures != other.measures
    return bool(self.text and other.text and not unlike)


def correct(answer: str, reference: str, method: str = "exact") -> bool:
  """Whether an answer is right.

  Args:
    answer: what the model said; a ``\\boxed{…}`` in it counts alone.
    reference: the right answer.
    method: ``exact`` (equal texts, space around them aside) or ``math`` (equal meaning).
  """
  if method == "exact":
    return answer.strip() == reference.strip()
  if method == "math":
    return equivalent(answer, reference)
  raise ValueError(f"env.grade = {method!r}: choose one of exact, math")


def equivalent(answer: str, reference: str, seconds: float = SECONDS) -> bool:
  """Whether two answers mean the same.

  ``seconds`` bounds the whole grade, also where sympy is asked about many parts of it; what is
  undecided by then is not the same.
  """
  if len(answer) > MAX_CHARACTERS:
    return answer.strip() == reference.strip()
  grade = _Grade(time.monotonic() + seconds, _text_words(answer) | _text_words(reference))
  readings = itertools.product(_readings(answer), _readings(reference))
  pairs = list(dict.fromkeys((a.text, b.text) for a, b in readings if a.may_equal(b)))
  if any(_same_text(a, b) for a, b in pairs):
    return True
  try:
    return any(_equivalent(a, b, grade) for a, b in pairs)
  except RecursionError:  # brackets or equations nested beyond any answer
    return False


def normalize(text: str) -> str:
  """One spelling for what LaTeX can write in several; its structure is kept."""
  return _readings(text)[0].text


def _text_words(text: str) -> frozenset[str]:
  words = {w for content in TEXT.findall(text) for w in re.findall("[A-Za-z]{2,}", content)}
  return frozenset(words) - KNOWN - {"and", "or"}


def _readings(text: str) -> list[_Reading]:
  """A text in each way that its units, commas and e can be meant, likeliest first."""
  text, measures = respelled(last_boxed(text) or text)
  typed, more = drop_units(text, plain=True)
  found: dict[_Reading, None] = {}
  for plain, units in ((typed, measures | more), (text, measures)):
    depths = (1, 0, len(plain)) if re.search(r",\s", plain) else (1, 0)
    for spelling in (_EXPONENT.sub(_power_of_ten, plain), plain):
      for depth in depths:
        found[_Reading(_spelled(_drop_thousands(spelling, depth)), units)] = None
  return list(found)


def _power_of_ten(match: re.Match[str]) -> str:
  return f"({match[1]}\\cdot 10^{{{match[2]}}})"


def _drop_thousands(text: str, depth: int) -> str:
  """Drops the commas of numbers that fewer than ``depth`` brackets enclose."""

  def number(match: re.Match[str]) -> str:
    before = text[: match.start()]
    enclosing = sum((c in _LISTS) - (c in _LIST_ENDS) for c in before)
    certain = ",0" in match[0]  # no number of a list is written 000
    return match[0].replace(",", "") if certain or enclosing < depth else match[0]

  return _THOUSANDS.sub(number, text)


def _spelled(text: str) -> str:
  text = text.strip().rstrip(".").strip()
  text = _MIXED.sub(lambda m: f"({m[1]}+\\frac{{{m[2] or m[4]}}}{{{m[3] or m[5]}}})", text)
  if mixed := _MIXED_PLAIN.match(text):
    text = "{}({}+{}/{})".format(*mixed.groups())
  return re.sub(r"\s+", " ", text)


def _squeezed(text: str) -> str:
  letter = _LETTER.match(text)
  # Space between digits separates numbers.
  return letter[1] if letter else re.sub(r"(?<!\d) | (?!\d)", "", text)


def _same_text(a: str, b: str) -> bool:
  """Whether two texts are equal, space aside, and the case of words: x is not X, yes is Yes."""
  if _squeezed(a) == _squeezed(b) or _squeezed(_folded(a)) == _squeezed(_folded(b)):
    return True
  if not (_CHOICE.match(a) or _CHOICE.match(b)):
    return False
  return _squeezed(a).upper() == _squeezed(b).upper()  # (b) is B


def _folded(text: str) -> str:
  if _HEXADECIMAL.fullmatch(text):
    return text.upper()
  longest_product = 2 if _is_words(text) else 3

  def word(match: re.Match[str]) -> str:
    lower = match[0].lower()
    short = longest_product == 2 and lower in _SHORT_WORDS
    return lower if short or len(lower) > longest_product else match[0]

  return re.sub(r"(?<![A-Za-z\\])[A-Za-z]+", word, text)


def _equivalent(a: str, b: str, grade: _Grade) -> bool:
  a, b = a.strip(), b.strip()
  for relation in (re.compile("="), _IN):
    if bool(relation.search(a)) != bool(relation.search(b)):
      a, b = _NAMED.sub("", a), _NAMED.sub("", b)
  if "=" in a and "=" in b:
    sides, others = a.split("=", 1), b.split("=", 1)
    return any(
      all(_equivalent(x, y, grade) for x, y in zip(sides, order))
      for order in (others, others[::-1])
    )
  for separator in (_UNION, _COMMA):
    parts, others = _split(a, separator), _split(b, separator)
    if separator is _COMMA:
      parts, others = _both_signs(parts), _both_signs(others)
    if len(parts) != len(others):
      return False
    if len(parts) > 1:  # a list of solutions or a union: in any order
      return _same_multiset(parts, others, grade)
  if len(_split(a, _RELATION)) > 1 or len(_split(b, _RELATION)) > 1:
    return _same_relation(a, b, grade)
  if (matrices := (_matrix(a), _matrix(b))) != (None, None):
    return _same_matrix(*matrices, grade)
  inner, other = _bracketed(a), _bracketed(b)
  if inner is not None and other is not None:
    items, others = _both_signs(_split(inner[1], _COMMA)), _both_signs(_split(other[1], _COMMA))
    if len(items) > 1 or inner[0] == "⟨⟩":
      if inner[0] != other[0] or len(items) != len(others):
        return False
      if inner[0] == "⟨⟩":
        return _same_multiset(items, others, grade)
      return all(_equivalent(x.strip(), y.strip(), grade) for x, y in zip(items, others))
  return _same_item(a, b, grade)


def _same_relation(a: str, b: str, grade: _Grade) -> bool:
  """x < 3 is 3 > x, and 1 < x < 3 is 3 > x > 1."""
  operands, others = _split(a, _RELATION), _split(b, _RELATION)
  signs, other_signs = _RELATION.findall(a), _RELATION.findall(b)
  if len(operands) != len(others) or len(signs) != len(other_signs):
    return False
  orders = [(others, other_signs)]
  if all(o.strip() for o in others):  # <1 and 1> are brackets
    orders.append((others[::-1], [_FLIPPED[s] for s in other_signs[::-1]]))
  return any(
    signs == order_signs and all(_equivalent(x, y, grade) for x, y in zip(operands, order))
    for order, order_signs in orders
  )


def _same_item(a: str, b: str, grade: _Grade) -> bool:
  if _same_text(a, b):
    return True
  if time.monotonic() > grade.deadline or (_is_words(a) and _is_words(b)):
    return False
  try:
    x, y = (parse(text.replace("%", ""), grade.words) for text in (a, b))
  except FormulaError:
    return False
  if same(x, y, grade.deadline - time.monotonic()):
    return True
  if ("%" in a) == ("%" in b):
    return False
  hundredth = ("num", "1/100")  # 50 % is 50, and it is 0.5
  x, y = (("*", x, hundredth), y) if "%" in a else (x, ("*", y, hundredth))
  return same(x, y, grade.deadline - time.monotonic())


def _is_words(text: str) -> bool:
  """Whether a text without operators is words rather than a product of letters."""
  runs = re.findall("[A-Za-z]+", text)
  if not _PROSE.fullmatch(text) or _FACTOR.search(text) or not KNOWN.isdisjoint(runs):
    return False
  letters = "".join(runs)
  return len(letters) > 2 or (len(letters) == 2 and (letters != letters.lower() or "o" in letters))


def _same_multiset(items: list[str], others: list[str], grade: _Grade) -> bool:
  left = list(others)
  for item in items:
    match = next((o for o in left if _equivalent(item.strip(), o.strip(), grade)), None)
    if match is None:
      return False
    left.remove(match)
  return not left


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
  """Splits where no bracket is open."""
  parts, depth, start, i = [], 0, 0, 0
  while i < len(text):
    depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
    if depth == 0 and (match := separator.match(text, i)):
      parts.append(text[start:i])
      start = i = match.end()
    else:
      i += 1
  parts.append(text[start:])
  return parts


def _both_signs(items: list[str]) -> list[str]:
  found = []
  for item in items:
    if "\\pm" in item:
      found += [item.replace("\\pm", "+"), item.replace("\\pm", "-")]
    else:
      found.append(item)
  return found


def _bracketed(text: str) -> tuple[str, str] | None:
  """(kind of brackets, content) of a text that one pair of brackets encloses."""
  text = text.strip()
  if len(text) < 2 or text[0] not in _LISTS or text[-1] not in _LIST_ENDS:
    return None
  depth = 0
  for i, c in enumerate(text):
    depth += (c in _OPENING) - (c in _CLOSING)
    if depth == 0 and i < len(text) - 1:
      return None
  return text[0] + text[-1], text[1:-1]


def _matrix(text: str) -> list[list[str]] | None:
  match = _MATRIX.fullmatch(text.strip())
  if match is None:
    return None
  return [row.split("&") for row in match[1].split("\\\\") if row.strip()]


def _same_matrix(a: list[list[str]] | None, b: list[list[str]] | None, grade: _Grade) -> bool:
  if a is None or b is None or [len(r) for r in a] != [len(r) for r in b]:
    return False
  pairs = [(x, y) for row, other in zip(a, b) for x, y in zip(row, other)]
  return all(_equivalent(x.strip(), y.strip(), grade) for x, y in pairs)
