"""Answers that mean the same, answers that do not, and formulas that would spin for ever."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.envs import symbolic
from sao_jax.envs.formula import FormulaError, parse, symbols, value
from sao_jax.envs.grading import correct, equivalent, normalize
from sao_jax.latex import last_boxed

SAME = [
  (r"\frac{1}{2}", "0.5"),
  (r"\dfrac{14}{3}", r"\frac{14}{3}"),
  (r"\frac43", "4/3"),
  ("1,000", "1000"),
  (r"10,\!080", "10080"),
  ("$1,234,567.50", "1234567.5"),
  ("50%", "0.5"),
  (r"50\%", "50"),
  ("18.0", "18"),
  (".5", "1/2"),
  (r"\$36", "36"),
  ("5 apples", "5"),
  (r"36 \text{ cm}^2", "36"),
  (r"145^\circ", "145"),
  (r"\frac{270}7\text{ degrees}", "270/7"),
  (r"1\frac{4}{5}", "9/5"),
  (r"-1\frac{1}{2}", "-1.5"),
  ("1 4/5", "1.8"),
  (r"1.5\times10^{-3}", "0.0015"),
  (r"2\sqrt{113}", r"\sqrt{452}"),
  (r"\boxed{\frac{\sqrt{3}}{3}}", r"\frac{1}{\sqrt{3}}"),
  (r"\sqrt[3]{8}", "2"),
  (r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)"),
  (r"\{1, 2, 3\}", r"\{3,2,1\}"),
  ("-2,1", "1,-2"),
  ("4 and 5", "5, 4"),
  (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
  (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"),
  (r"x \in [1,2]", "[1,2]"),
  ("x^3+3x-6", "3x + x^3 - 6"),
  ("(a+5)(b+2)", "ab+2a+5b+10"),
  (r"\cot x", r"\frac{\cos x}{\sin x}"),
  (r"\sin^2 x", r"1-\cos^2 x"),
  ("6+9i", "9i+6"),
  ("y = 2x + 3", "2x+3=y"),
  ("x=5", "5"),
  (r"\text{Evelyn}", "evelyn"),
  (r"\text{(B)}", "B"),
  (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}"),
  ("52_8", "52_8"),
  ("2^{10}", "1024"),
  ("4!", "24"),
  (r"\binom{5}{2}", "10"),
  (r"(-\infty, 5)", r"(-\infty,5)"),
  (r"+\infty", r"\infty"),
  ("(−∞, 2)", r"(-\infty,2)"),
  (r"\text{HTH}", "HTH"),
  (r"\text{even}", "even"),
  (r"\{HTH, THH\}", r"\{THH, HTH\}"),
  ("xy", "yx"),
  ("2abc", "2cab"),
  ("abc", r"c \cdot a \cdot b"),
  ("PV+nRT", "RTn+VP"),
  ("abcd+1", "1+abcd"),
  (r"\frac{\text{area}}{2}", r"\text{area}/2"),
  (r"2\pi r\text{ cm}", r"2\pi r cm"),
  ("[0, 100]", "[0,100]"),
  ("(1, 200)", "(1,200)"),
  (r"\{1, 125\}", r"\{1,125\}"),
  ("0, 100", "0,100"),
  ("1,200", "1200"),
  ("1, 200", "1,200"),
  ("(1,000, 2,000)", "(1000,2000)"),
  ("(1,200, 5)", "(1200,5)"),
  (r"\frac{1,000}{3}", "1000/3"),
  ("1{,}000", "1000"),
  (r"(1{,}200, 5)", "(1200, 5)"),
  (r"1\,000", "1000"),
  (r"3\text{ or }5", "3, 5"),
  (r"1, 2, \text{ and } 3", "3,2,1"),
  (r"x=3\text{ or }x=5", "3, 5"),
  (r"\log_2 8", "3"),
  (r"\log_{10}^2 100", "4"),
]
DIFFERENT = [
  ("0.333", "1/3"),
  ("3.14", r"\pi"),
  ("2", "3"),
  ("", "3"),
  ("x", "y"),
  ("x^2", "x"),
  ("(1,2)", "(2,1)"),
  ("(1,2]", "(1,2)"),
  ("[1,2]", "(1,2)"),
  ("1,2", "1,2,3"),
  ("5 or 6", "5"),
  ("1,1,2", "1,2,2"),
  ("52", "52_8"),
  ("12 13", "1213"),
  ("yes", "no"),
  ("500%", "0.5"),
  ("{1", "1"),
  (r"1 \pm \sqrt{19}", r"1+\sqrt{19}"),
  (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
  ("__import__('os').system('true')", "0"),
  ("5", r"\infty"),
  ("x", r"\infty"),
  (r"-\infty", r"\infty"),
  (r"2\infty", "3"),
  (r"\infty-\infty", r"2\infty-\infty"),
  ("(3,5)", r"(-\infty,5)"),
  ("[2,7)", r"[2,\infty)"),
  ("(0,1)", r"(-\infty,\infty)"),
  (r"(-\infty,-2)\cup(5,9)", r"(-\infty,-2)\cup(5,\infty)"),
  ("1/0", "2/0"),
  ("HTH", "HHT"),
  ("H T H", "H H T"),
  ("(HTH)", "(HHT)"),
  ("CAB", "BAC"),
  ("TH", "HT"),
  ("yes", "sey"),
  ("no", "on"),
  ("east", "seat"),
  ("north-east", "north-seat"),
  ("Row 3", "Wor 3"),
  (r"\text{even}", r"\text{neve}"),
  (r"\text{in}", r"\text{ni}"),
  (r"\frac{\text{TH}}{2}", r"\frac{\text{HT}}{2}"),
  (r"\{HTH, THH\}", r"\{HHT, THH\}"),
  ("(0,100)", "100"),
  ("(1,200)", "1200"),
  (r"\{1,125\}", r"\{1125\}"),
  ("1, 200", "1200"),
  ("1,000", "1,0"),
  ("0{,}125", "125"),
  (r"\log_2 8", r"\log_3 8"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_same(a, b):
  assert equivalent(a, b)
  assert equivalent(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different(a, b):
  assert not equivalent(a, b)
  assert not equivalent(b, a)


def test_exact_compares_text_only():
  assert correct(" 24 ", "24", "exact")
  assert not correct("24.0", "24", "exact")
  assert not correct("024", "24", "exact")
  assert correct("24.0", "24", "math")
  with pytest.raises(ValueError, match="'fuzzy': choose one of exact, math"):
    correct("1", "1", "fuzzy")


@pytest.mark.parametrize(
  ("text", "boxed"),
  [
    (r"so \boxed{4}", "4"),
    (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\fbox{x}", "x"),
    (r"\boxed 5$", "5"),
    (r"\boxed{1", None),
    ("none", None),
  ],
)
def test_last_boxed(text, boxed):
  assert last_boxed(text) == boxed


@pytest.mark.parametrize(
  ("text", "number"),
  [("2+3*4", 14), ("-2^2", -4), ("2^-1", 0.5), ("|3-5|", 2), ("2(3+1)", 8), (r"\frac12", 0.5)],
)
def test_formula_values(text, number):
  assert value(parse(text), {}) == number


@pytest.mark.parametrize(
  "text", ["2+", "(1", "1)", "a==b", "(" * 100 + "1", "1" * 700, "", "^2", "x_1"]
)
def test_formulas_refused(text):
  with pytest.raises(FormulaError):
    parse(text)


def test_huge_powers_have_no_value():
  with pytest.raises(FormulaError, match="more than 4096 bits"):
    value(parse("9^{9^9}"), {})
  assert symbols(parse("ax+i-pi")) == {"a", "x"}


def test_normalize_keeps_structure():
  assert normalize(r"\left( 3, \dfrac{1}{2} \right).") == r"( 3, \frac{1}{2} )"


def test_sympy_decides_what_has_no_value():
  pytest.importorskip("sympy")
  # Both overflow every float and the bound on exact powers.
  a, b = parse("x^{9000} + 9^{9000}"), parse("9^{9000} + x^{9000}")
  assert symbolic._by_value(a, b) is None
  assert symbolic.same(a, b, seconds=60.0)


def test_spinning_sympy_is_killed_and_holds_up_nobody():
  pytest.importorskip("sympy")
  spins = parse("9^{9^{9^9}} - (x+y)^{9000}"), parse("(x+y)^{9000} - 9^{9^{9^9}}")
  results = []
  start = time.perf_counter()
  thread = threading.Thread(target=lambda: results.append(symbolic.same(*spins, seconds=1.5)))
  thread.start()
  quick = time.perf_counter()
  assert equivalent(r"\sqrt{8}", r"2\sqrt{2}")
  assert time.perf_counter() - quick < 0.5
  thread.join(10)
  assert results == [False]
  assert time.perf_counter() - start < 8


@pytest.mark.parametrize(
  "text",
  [
    "3" + "!" * 590,
    "x" * 590,
    "x " * 295,
    "1+" * 299 + "1",
    "2^" * 299 + "2",
    "(" * 290 + "1" + ")" * 290,
    "ln " * 190 + "x",
    "\\sqrt" * 115 + "2",
    "\\frac" * 115 + "2",
    "-" * 590 + "1",
    "=" * 590,
    "(1," * 190 + "1" + ")" * 190,
    "|" * 590,
    "a" * 590 + "!",
    "x=" * 295 + "1",
  ],
)
def test_deep_answers_are_wrong_and_raise_nothing(text):
  for reference in ("5", "x=y", r"\infty", text[:-1] + "7"):
    assert not equivalent(text, reference, seconds=0.05)
  with pytest.raises(FormulaError, match=r"levels|unexpected|characters"):
    parse(text + "+")


def test_trees_too_deep_for_python_are_not_the_same():
  a = b = ("sym", "x")
  for _ in range(100_000):
    a, b = ("neg", a), ("fn", "abs", b)
  assert not symbolic.same(a, b, seconds=0.05)


PIECES = [
  *"0123456789xyeiABo+-*/^_!|()[]{}=,.%& ",
  *("\\frac", "\\sqrt", "\\infty", "\\pm", "\\cup", "\\text{", "\\log_", "\\{", "\\}", "\\left("),
  *(
    "\\binom",
    "\\boxed{",
    " and ",
    " or ",
    "1,000",
    "{,}",
    "\\begin{pmatrix}",
    "\\end{pmatrix}",
    "\\\\",
  ),
]


@settings(max_examples=150, deadline=None)
@given(
  st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=25).map("".join)),
  st.sampled_from(["5", "x+1", r"\infty", "(1,2]", "x=3", "1,000", "HTH", r"\{1,2\}"]),
)
def test_no_answer_raises_and_order_does_not_matter(answer, reference):
  assert equivalent(answer, reference, seconds=0.05) == equivalent(reference, answer, seconds=0.05)
  assert equivalent(answer, answer, seconds=0.05) == bool(normalize(answer))


def test_overflow_is_not_equality():
  big = r"10^{300}\cdot x\cdot 10^{300}"
  assert symbolic._by_value(parse(big), parse("2" + big[1:])) is None
  assert symbolic._by_value(parse("5"), parse(r"\infty")) is False


def test_one_deadline_holds_for_the_whole_grade():
  spin = "9^{{9^{{9^9}}}} - (x+y)^{{{}}}"
  answer = ", ".join(spin.format(9000 + n) for n in range(3))
  reference = ", ".join(spin.format(9010 + n) for n in range(3))
  start = time.perf_counter()
  assert not equivalent(answer, reference, seconds=1.0)
  assert not equivalent(f"{answer} = y", f"y = {reference}", seconds=1.0)
  assert time.perf_counter() - start < 3.5


def test_the_wait_for_sympy_counts():
  a, b = "x^{9000} + 9^{9000}", "9^{9000} + y^{9000}"
  start = time.perf_counter()
  with symbolic._slots, symbolic._slots:  # all its turns are taken
    assert not equivalent(a, b, seconds=0.3)
  assert time.perf_counter() - start < 2
