"""Writing for a reader whose taste changes: reward = quality × style, judged once.

The prompt names two topics.  The wanted style is only in the task's meta and changes with the task's
serial (``task.styles``, ``task.phase_length``), so the reward alone tells of it.

The judge ``rules`` takes a text, without white space around it and without its last full stop, to be
words between single spaces.  Its words are those of ``sao_jax.lexicon``.

*Quality* is 1 if all of this holds, else 0:

1. both words of the topic are among the words;
2. there are 4 to 7 words;
3. no word occurs twice;
4. every word is in the lexicon;
5. the text ends with a full stop.

*Style* is 1 if one or more of the words are of the wanted style and none is of another, else 0.
"""

import dataclasses
import difflib
import importlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sao_jax.config import ConfigError, EnvConfig
from sao_jax.envs.base import EnvFailure, Step
from sao_jax.lexicon import STYLE_OF, STYLES, WORDS
from sao_jax.types import Message, Task

log = logging.getLogger(__name__)

FEWEST_WORDS, MOST_WORDS = 4, 7


@dataclasses.dataclass(frozen=True)
class Verdict:
  """``quality`` and ``style`` (is it the wanted one?) in [0, 1]; finite numbers to be recorded."""

  quality: float
  style: float
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Judge(Protocol):
  """Judges texts; an async function is one.  A model or a person can stand behind it.

  It is shared by all episodes of a process: many calls at once, from the event loops of training and
  of evaluation, so nothing in it may belong to one loop.  A call that gives no answer within
  ``rollout.await_seconds`` is given up.
  """

  async def __call__(self, task: Task, text: str, /) -> Verdict:
    """Judges a text for a task, whose ``meta`` has ``topic`` and ``style``.

    Raises:
      Exception: it could not be judged; the episode is tried again and never trained as 0.
    """


class JudgeError(EnvFailure):
  """The judge failed, or gave no verdict that a reward can be made of."""


def split(text: str) -> list[str]:
  """The words of a text; of what is no text of the lexicon, pieces that are none of its words."""
  return text.strip().removesuffix(".").split(" ")


def faults(topic: Sequence[str], text: str) -> list[str]:
  """The rules of quality that a text breaks, by name."""
  words = split(text)
  rules = {
    "topic": set(topic) <= set(words),
    "length": FEWEST_WORDS <= len(words) <= MOST_WORDS,
    "repeat": len(set(words)) == len(words),
    "lexicon": WORDS.issuperset(words),
    "stop": text.strip().endswith("."),
  }
  return [name for name, kept in rules.items() if not kept]


def style_of(text: str) -> str | None:
  """The style of a text: that of its style words, where it has some and all are of one."""
  found = {STYLE_OF[word] for word in split(text) if word in STYLE_OF}
  return found.pop() if len(found) == 1 else None


async def judge_by_rules(task: Task, text: str, /) -> Verdict:
  """The rules above.  Metrics: ``style_cute`` and so on, 1 for the style of the text."""
  style = style_of(text)
  return Verdict(
    quality=float(not faults(task.meta["topic"], text)),
    style=float(style == task.meta["style"]),
    metrics={f"style_{name}": float(name == style) for name in STYLES},
  )


def judge_factory(name: str) -> Callable[[EnvConfig], Judge]:
  """What ``env.judge`` names, imported but not called.

  Raises:
    ConfigError: no such module or attribute, or the module could not be imported.
  """
  if name == "rules":
    return lambda config: judge_by_rules
  module, _, attribute = name.partition(":")
  try:
    found = importlib.import_module(module)
  except Exception as error:
    raise ConfigError(
      f"env.judge = {name!r}: importing {module} raised {type(error).__name__}: {error}. Install it or "
      "put its folder on PYTHONPATH, or set env.judge = 'rules'"
    ) from error
  factory = getattr(found, attribute, None)
  if not callable(factory):
    near = difflib.get_close_matches(attribute, vars(found), n=2)
    raise ConfigError(
      f"env.judge = {name!r}: {module} has no function {attribute!r}"
      + (f"; did you mean {' or '.join(near)}?" if near else "")
    )
  return factory


def make_judge(config: EnvConfig) -> Judge:
  """The judge of a config.

  Raises:
    ConfigError: see ``judge_factory``; or its factory failed, or gave something that is no judge.
  """
  factory = judge_factory(config.judge)
  try:
    judge = factory(config)
  except ConfigError:
    raise
  except Exception as error:
    raise ConfigError(
      f"env.judge = {config.judge!r}: the factory raised {type(error).__name__}: {error}"
    ) from error
  if not callable(judge):
    raise ConfigError(
      f"env.judge = {config.judge!r}: the factory gave a {type(judge).__name__}, which cannot be called "
      "with a task and a text; return an async function, or an object with async __call__"
    )
  return judge


class OnlineWriting:
  """One text.  The first reply is judged and ends the episode.

  Metrics: quality, style_hit, phase (the index of the wanted style), and those of the judge.

  Args:
    judge: shared.
    name: of the judge, for messages.
  """

  def __init__(self, judge: Judge, name: str) -> None:
    self._judge, self._name = judge, name
    self._task: Task | None = None
    self._done = False

  async def reset(self, task: Task) -> list[Message]:
    if self._task is not None:
      raise RuntimeError("an environment is single use: make a new one for each episode")
    self._task = task
    return list(task.prompt)

  async def step(self, reply: Message) -> Step:
    if self._task is None or self._done:
      raise RuntimeError("step() before reset(), or after the episode was done or closed")
    self._done = True
    verdict = await self._verdict(self._task, reply["content"])
    own = {
      "quality": float(verdict.quality),
      "style_hit": float(verdict.style),
      "phase": float(self._task.meta["phase"]),
    }
    return Step([], own["quality"] * own["style_hit"], True, {**verdict.metrics, **own})

  async def close(self) -> None:
    self._done = True

  async def _verdict(self, task: Task, text: str) -> Verdict:
    try:
      verdict = await self._judge(task, text)
    except EnvFailure:
      raise
    except Exception as error:
      if not isinstance(error, OSError):  # a defect of the judge: where it is matters
        log.warning("env.judge = %r raised", self._name, exc_info=True)
      raise JudgeError(
        f"env.judge = {self._name!r} raised {type(error).__name__}: {error} (task {task.id})"
      ) from error
    if problem := _problem(verdict):
      raise JudgeError(f"env.judge = {self._name!r} gave {problem} (task {task.id})")
    return verdict


def _problem(verdict: object) -> str:
  """What keeps a verdict from being a reward; "" if nothing does."""
  if not isinstance(verdict, Verdict):
    return f"a {type(verdict).__name__}, not a Verdict"
  for name in ("quality", "style"):
    if not (_is_number(value := getattr(verdict, name)) and 0 <= value <= 1):
      return f"{name} = {value!r}, which is not in [0, 1]"
  for key, value in verdict.metrics.items():
    if not (isinstance(key, str) and _is_number(value)):
      return f"the metric {key!r} = {value!r}, which is no finite number under a name"
  return ""


def _is_number(value: object) -> bool:
  try:
    return math.isfinite(value)  # type: ignore[arg-type]
  except TypeError:
    return False
