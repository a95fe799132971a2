r"""Words that say what a number counts or measures, and so add nothing to its value.

Only words of these lists are units.  A word that changes the value (``million``, ``plus``,
``squared``, ``thirds``) is in none of them.
"""

import re

# What is measured: the symbol that stands for a unit, then its other spellings.  5 cm is not 5 m.
_MEASURES = {
  "mm": "millimeter millimeters millimetre millimetres",
  "cm": "centimeter centimeters centimetre centimetres",
  "dm": "decimeter decimeters decimetre decimetres",
  "m": "meter meters metre metres",
  "km": "kilometer kilometers kilometre kilometres",
  "nm": "nanometer nanometers nanometre nanometres",
  "in": "inch inches",
  "ft": "foot feet",
  "yd": "yds yard yards",
  "mi": "mile miles",
  "mg": "milligram milligrams",
  "g": "gram grams",
  "kg": "kgs kilogram kilograms",
  "lb": "lbs pound pounds",
  "oz": "ounce ounces",
  "ton": "tons tonne tonnes",
  "ms": "millisecond milliseconds",
  "s": "sec secs second seconds",
  "min": "mins minute minutes",
  "h": "hr hrs hour hours",
  "day": "days",
  "week": "weeks",
  "month": "months",
  "year": "yr yrs years",
  "decade": "decades",
  "century": "centuries",
  "mL": "ml milliliter milliliters millilitre millilitres",
  "L": "liter liters litre litres",
  "gal": "gallon gallons",
  "quart": "quarts",
  "pint": "pints",
  "cup": "cups",
  "tbsp": "tablespoon tablespoons",
  "tsp": "teaspoon teaspoons",
  "acre": "acres",
  "ha": "hectare hectares",
  "dollar": "dollars USD",
  "cent": "cents",
  "euro": "euros",
  "N": "newton newtons",
  "J": "joule joules",
  "kJ": "kilojoule kilojoules",
  "W": "watt watts",
  "kW": "kilowatt kilowatts",
  "V": "volt volts",
  "K": "kelvin kelvins",
  "Hz": "hertz",
  "Pa": "pascal pascals",
  "mol": "mole moles",
  "cal": "calorie calories",
  "rad": "radian radians",
  "Celsius": "",
  "Fahrenheit": "",
  "am": "AM a.m. A.M.",
  "pm": "PM p.m. P.M.",
}
# Units that are written as one word and made of others.
_COMPOUND = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "kWh": ("kW", "h")}
# What is counted, in the singular; any of these goes with any other, as pupils do with students.
_COUNTED = """
  unit piece part item object thing time way case kind type number value point place position step
  integer digit factor divisor multiple solution root term zero prime square triangle rectangle
  circle side edge vertex face diagonal angle line segment tile block cube block row column cell
  person man woman child adult kid boy girl student pupil teacher player member worker employee
  friend team family guest customer passenger sister brother people
  animal dog cat cow horse sheep chicken duck pig goat rabbit fish bird bee ant frog
  apple orange banana pear peach lemon mango grape cherry strawberry egg cookie cake pie pizza
  slice candy sandwich bagel muffin donut cupcake potato carrot tomato loaf
  book page word letter story card stamp coin penny nickel dime bill note ticket
  pencil pen crayon marker notebook paper sheet envelope box bag basket bottle can jar carton pack
  package packet crate bucket bowl plate glass bar roll ball balloon bead marble toy doll shirt sock
  shoe hat button ribbon rope brick board nail chair table desk bed room house floor
  building window door car truck bus bike bicycle wheel boat train plane tree flower plant seed
  leaf rose petal game match race round lap goal shot question problem answer test lesson class
  course vote seat trip arrangement combination permutation outcome path route
  subset element committee handshake revolution rotation flip toss
  serving meal batch share stick stone rock shell star photo picture song video job task turn bit
  byte
"""
_IRREGULAR = {
  "person": "persons",
  "man": "men",
  "woman": "women",
  "child": "children",
  "vertex": "vertices",
  "loaf": "loaves",
  "leaf": "leaves",
  "people": "people",
  "sheep": "sheep",
  "fish": "fish",
}
_NOT_SINGULAR = {"time", "zero", "square", "root", "factor", "prime", "can", "number"}


def _plural(word: str) -> str:
  if word in _IRREGULAR:
    return _IRREGULAR[word]
  if word.endswith("y") and word[-2] not in "aeiou":
    return word[:-1] + "ies"
  return word + ("es" if word.endswith(("s", "x", "ch", "sh", "tomato", "potato")) else "s")


# "2 times" goes on to say what by, so it ends no answer; "2 square" is no count either.
_COUNTS = {w for word in _COUNTED.split() for w in (word, _plural(word))}
_COUNTS -= _NOT_SINGULAR | {"times", "roots"}
_SYMBOL_OF = {
  spelling: symbol
  for symbol, spellings in _MEASURES.items()
  for spelling in (symbol, *spellings.split())
}
_ALL = {*_SYMBOL_OF, *_COMPOUND, *_COUNTS}


def _any_of(words: set[str]) -> str:
  """A pattern for one of some words: words in any case, symbols (mL, kW) as they are written."""
  long = sorted((w for w in words if len(w) > 3), key=lambda w: (-len(w), w))
  short = sorted((w for w in words if len(w) <= 3), key=lambda w: (-len(w), w))
  found = []
  if long:
    found.append("(?i:" + "|".join(map(re.escape, long)) + ")")
  found += map(re.escape, short)
  return "(?:" + "|".join(found) + ")(?![A-Za-z])"


def _phrase(one: str, joined: str) -> str:
  """A pattern for ``one`` unit, or for some: m/s^2, square feet, miles per hour."""
  power = r"(?: ?\^ ?(?:-?\d|\{ ?-?\d ?\}))?(?: squared| cubed)?"
  size = r"(?:(?i:square|cubic|sq\.?|cu\.?) )?"
  joint = r"(?: ?/ ?| ?\\cdot ?| per (?:an? |one )?| )"
  return rf"{size}{one}{power}(?:{joint}{size}{joined}{power}){{0,3}}"


_WORD = _any_of(_ALL)
_LONG = _any_of({w for w in _ALL if len(w) > 1})
_COMMAND = r"\\(?:text|mbox|mathrm|textrm|operatorname) ?\{"
_POWER = r"(?: ?\^ ?(?:-?\d|\{ ?-?\d ?\}))?"
_IN_TEXT = rf"{_COMMAND} ?(?:(?:/|per) ?)?{_phrase(_WORD, _WORD)}\.? ?\}}{_POWER}"
# A number, a bracket that closes, a constant or a letter by itself: what a unit can follow.
_OPERAND = r"[\d})!]|\\(?:pi|theta|infty)(?![a-z])|(?<![A-Za-z\\])[A-Za-z]"
_TEXT_UNITS = re.compile(
  rf"(?P<before>{_OPERAND}) ?(?P<unit>{_IN_TEXT}(?: ?/? ?{_IN_TEXT}){{0,3}})"
)
_END = r"(?= ?(?:$|\.(?!\d)|[,;)\]⟩}&=<>]|\\\\|\\(?:cup|le|ge|ne)(?![a-zA-Z])|(?:and|or) ))"
# A lone letter is a symbol (5 m is 5m), but one over another is a unit: 5 m/s.
_RATIO = rf"{_WORD}{_POWER} ?/ ?{_WORD}{_POWER}"
_PLAIN_UNITS = re.compile(
  rf"(?P<before>{_OPERAND})"
  rf"(?: (?P<unit>{_phrase(_LONG, _WORD)}|{_RATIO})"
  rf"|(?P<tight>(?:[ckm]m|kg|lbs|mph){_POWER}))\.?{_END}"
)


def drop_units(text: str, *, plain: bool) -> tuple[str, frozenset[str]]:
  r"""A text without its units, and which measures they were (``cm``, ``h``).

  Args:
    text: with single spaces.
    plain: drop units as they are typed (``5 cm``), else those that LaTeX sets as text
      (``5\text{ cm}``), which can be nothing else.
  """
  found: set[str] = set()

  def drop(match: re.Match[str]) -> str:
    if plain and match["before"].isalpha() and not re.search(r"[\d\\]", text[: match.start()]):
      return match[0]  # "a foot" is prose
    found.update(_measures(match["unit"] or match["tight"] if plain else match["unit"]))
    return match["before"]

  return (_PLAIN_UNITS if plain else _TEXT_UNITS).sub(drop, text), frozenset(found)


def _measures(phrase: str) -> set[str]:
  found: set[str] = set()
  for word in re.findall(r"[A-Za-z]\.[A-Za-z]\.|[A-Za-z]+", phrase):
    spelling = word if word in _SYMBOL_OF or len(word) <= 3 else word.lower()
    if word.title() in ("Celsius", "Fahrenheit"):
      spelling = word.title()
    if spelling in _COMPOUND:
      found.update(_COMPOUND[spelling])
    elif spelling in _SYMBOL_OF:
      found.add(_SYMBOL_OF[spelling])
  return found
