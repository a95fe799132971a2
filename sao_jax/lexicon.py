"""The words of the writing task: what its prompts ask for, its traces say and its judge knows.

All are lower case and short, so that the character vocabulary can spell them.  No word is in two
lists.  Style words are adjectives, so that each fits before each topic.
"""

STYLES = {
  "cute": "tiny sweet cozy soft fuzzy puffy happy comfy".split(),
  "chuunibyou": "hexed dark fated feral grim dread vile eerie".split(),
  "classical": "fair noble jade hoary lofty pious regal olden".split(),
  "academic": "novel modal exact valid local prime dual ideal".split(),
}
TOPICS = "tea rain moon cat sea snow wind fire tree bird lamp road bread river star door".split()
NEUTRAL = "a and by in near of on the under with".split()
WORDS = frozenset([*TOPICS, *NEUTRAL, *(word for style in STYLES.values() for word in style)])
STYLE_OF = {word: style for style, words in STYLES.items() for word in words}
