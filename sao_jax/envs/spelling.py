r"""One spelling for what an answer can write in several: Unicode, Markdown, LaTeX's synonyms.

``≤``, ``\leq`` and ``<=`` become ``\le``; ``2²`` becomes ``2^{2}``; ``\(5\)`` and ``**5**`` become
``5``; ``5 million`` becomes a product; units that are set as text are dropped.
"""

import re

from sao_jax.envs.units import drop_units

TEXT = re.compile(r"\\(?:text|mbox|mathrm|textrm|textbf|textit|mathbf|operatorname)\s*\{([^{}]*)\}")
_TIGHT_THOUSANDS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:(?:\{,\}|,\\!|\\,)\d{3})+(?!\d)")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|`")  # of formulas: \(5\), \[5\]
_EMPHASIS = re.compile(r"\s*(\*{1,3}|__)(?![\s*])(.*[^\s*_])\1\s*", re.S)  # Markdown's
_DROP = re.compile(
  r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[!;:,> ]|\\displaystyle|\\big[lr]?|\\Big[lr]?|~"
  r"|\\q?quad(?![a-z])|\\(?:thin|medium|thick)?space(?![a-z])"
)
# What a keyboard or a model writes for a LaTeX command.
_SIGNS = r"""
  · \cdot  ⋅ \cdot  ∙ \cdot  × \times  ÷ /  ⁄ /  ∕ /  ± \pm  ∓ \mp  ∞ \infty  √ \sqrt
  ≤ \le  ⩽ \le  ≥ \ge  ⩾ \ge  ≠ \ne  ∈ \in  ∪ \cup  ∩ \cap  ∅ \emptyset  → \to  ∘ \circ  º °
  ∛ \sqrt[3]  ∜ \sqrt[4]  ℝ \mathbb{R}  ℤ \mathbb{Z}  ℕ \mathbb{N}  ℚ \mathbb{Q}
  ½ \frac{1}{2}  ⅓ \frac{1}{3}  ⅔ \frac{2}{3}  ¼ \frac{1}{4}  ¾ \frac{3}{4}  ⅕ \frac{1}{5}
  ⅖ \frac{2}{5}  ⅙ \frac{1}{6}  ⅚ \frac{5}{6}  ⅛ \frac{1}{8}  ⅜ \frac{3}{8}  ⅝ \frac{5}{8}
  ⅞ \frac{7}{8}  α \alpha  β \beta  γ \gamma  δ \delta  ε \epsilon  θ \theta  λ \lambda  μ \mu
  π \pi  ρ \rho  σ \sigma  τ \tau  φ \phi  ω \omega  Δ \Delta
""".split()
_CHARACTERS = str.maketrans(
  {
    **{sign: f"{latex} " for sign, latex in zip(_SIGNS[::2], _SIGNS[1::2])},
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f", " "),
    **dict.fromkeys("\u2061\u2062\u200b", ""),
  }
)
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_PLACED = re.compile(f"([{_RAISED}]+)|([{_LOWERED}]+)")
_LEVEL = str.maketrans(_RAISED + _LOWERED, "0123456789-+n0123456789")
_ROOT_OF_NUMBER = re.compile(r"√ ?(\d+(?:\.\d+)?)")  # √12, where \sqrt12 is \sqrt{1}2
_SYNONYMS = [
  (re.compile(r"\\(?:leq|leqslant|leqq)(?![a-zA-Z])|<=|=<"), r"\\le "),
  (re.compile(r"\\(?:geq|geqslant|geqq)(?![a-zA-Z])|>="), r"\\ge "),
  (re.compile(r"\\neq(?![a-zA-Z])|\\not ?=| != "), r"\\ne "),  # 4!=24 is a factorial
  (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
  (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
  (re.compile(r"\\varnothing(?![a-zA-Z])|⟨ ?⟩"), r"\\emptyset "),
  (re.compile(r"\\(?:rightarrow|longrightarrow)(?![a-zA-Z])"), r"\\to "),
  (re.compile(r"\\bigcup(?![a-zA-Z])"), r"\\cup "),
  (re.compile(r"\\lvert(?![a-zA-Z])|\\rvert(?![a-zA-Z])|\\vert(?![a-zA-Z])"), "|"),
  (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
  (re.compile(r"\{ ?\\rm(?![a-z]) ?([^{}]*)\}"), r"\\text{\1}"),
  (re.compile(r"\\ast(?![a-z])"), "*"),
  # 2516_8 is 2516_{8}
  (re.compile(r"(?<!log)_ ?(\d+)"), r"_{\1}"),
  (re.compile(r"_ ?([A-Za-z\d])"), r"_{\1}"),
  (re.compile(r"_\{ (\w+) ?\}|_\{(\w+) \}"), r"_{\1\2}"),
]
_DEGREES = re.compile(
  r"(?<=[\d})A-Za-z])\s*(?:\^ ?\{? ?\\(?:circ|degree)(?![a-z]) ?\}?|(?<=[\d}])\\circ(?![a-z])"
  r"|(?<=[\d}] )\\circ(?![a-z])|\\degree(?![a-z])|°"
  r"|(?<![A-Za-z])degrees?(?![a-z])|\\(?:text|mbox|mathrm|textrm) ?\{ ?degrees? ?\})"
  r"(?P<scale> ?(?:\\(?:text|mbox|mathrm|textrm) ?\{ ?)?"
  r"(?:[CF]|Celsius|Fahrenheit)(?![A-Za-z]) ?\}?)?"
)
_ANGLE_FUNCTION = re.compile(r"(?<!arc)(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_PERCENT = re.compile(
  r"(?<=[\d}) ]) ?(?:\\(?:text|mbox|mathrm|textrm) ?\{ ?per ?cent ?\}|per ?cent\b)"
)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MULTIPLIER = re.compile(
  r"(?<=[\d})]) ?(?:(?:\\(?:text|mbox|mathrm|textrm) ?\{ ?)(?P<text>NAMES)s?(?![a-z])"
  r"(?P<more>[^{}]*)\}"
  r"|(?P<plain>NAMES)s?(?![A-Za-z]))".replace("NAMES", "|".join([*_POWERS, "dozen"])),
  re.I,
)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,/^])(?<!\d )[1-9]\d{0,2}(?: \d{3})+(?!\d| \d|/| /)")


def respelled(text: str) -> tuple[str, frozenset[str]]:
  """One spelling of what has several, without units that are set as text; and those units."""
  text = _ROOT_OF_NUMBER.sub(r"\\sqrt{\1}", text)
  text = _PLACED.sub(lambda m: f"{'^' if m[1] else '_'}{{{m[0].translate(_LEVEL)}}}", text)
  text = _DELIMITERS.sub("", text.translate(_CHARACTERS))
  if emphasis := _EMPHASIS.fullmatch(text):
    text = emphasis[2]
  text = _TIGHT_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
  text = text.replace("\\!", "").replace("\\%", "%")
  text = re.sub(r"\\\$|\$|£|€", "", text)
  text = text.replace("\\{", "⟨").replace("\\}", "⟩")  # sets, apart from LaTeX groups
  text = re.sub(r"\s+", " ", _DROP.sub(" ", text))
  for pattern, spelling in _SYNONYMS:
    text = pattern.sub(spelling, text)
  text = _SPACED_THOUSANDS.sub(lambda m: m[0].replace(" ", ""), re.sub(r"\s+", " ", text).strip())
  text = _MULTIPLIER.sub(_multiplied, _PERCENT.sub("%", text))
  scales: set[str] = set()

  def degrees(match: re.Match[str]) -> str:
    if match["scale"]:
      scales.add("Celsius" if "C" in match["scale"] else "Fahrenheit")
    return "°" if _ANGLE_FUNCTION.search(match.string) else ""

  text, measures = drop_units(_DEGREES.sub(degrees, text), plain=False)
  text = re.sub(r"\s+", " ", TEXT.sub(lambda m: f" {m[1]} ", text)).strip()
  return text, measures | scales


def _multiplied(match: re.Match[str]) -> str:
  name = (match["text"] or match["plain"]).lower()
  factor = f"10^{{{_POWERS[name]}}}" if name in _POWERS else "12"
  more = f"\\text{{{match['more']}}}" if (match["more"] or "").strip() else ""
  return f"\\cdot {factor}{more}"
