"""Texts on two topics for a supervised start: all styles, some of them badly written."""

import random
from collections.abc import Sequence

from sao_jax.lexicon import STYLES, TOPICS

# The distractor is the most frequent style, and none is so rare that RL would have to invent it.
SHARES = {"academic": 0.32, "cute": 0.16, "chuunibyou": 0.27, "classical": 0.25}
FAULTS = ("off_topic", "repeats", "misspells", "too_short", "no_stop", "mixes")
_JOINTS = ("and", "by", "in", "near", "by the", "in a")


def compose(rng: random.Random, topic: Sequence[str], good_fraction: float) -> tuple[str, str]:
  """(kind, text), such as ("good", "tiny tea by the rain.").

  The style has the probabilities SHARES.  Of ``good_fraction`` the text is well written; the rest
  has one of FAULTS, each as often.  ``mixes`` is of good quality, but takes a word of another style.
  """
  style = rng.choices(tuple(SHARES), tuple(SHARES.values()))[0]
  kind = "good" if rng.random() < good_fraction else rng.choice(FAULTS)
  here, there = rng.sample(list(topic), 2)
  word, joint, end = rng.choice(STYLES[style]), rng.choice(_JOINTS), "."
  match kind:
    case "off_topic":
      there = rng.choice([other for other in TOPICS if other not in topic])
    case "repeats":
      joint = f"{joint} {word}"
    case "misspells":
      word = word[:-1]
    case "too_short":
      return kind, f"{word} {here} {there}."
    case "no_stop":
      end = ""
    case "mixes":
      other = rng.choice([name for name in STYLES if name != style])
      joint = f"{joint} {rng.choice(STYLES[other])}"
  return kind, f"{word} {here} {joint} {there}{end}"
