"""The judge's rules by hand, and judges that fail: named, and never a reward of 0."""

import asyncio
import dataclasses

import pytest

from sao_jax.config import ConfigError, EnvConfig
from sao_jax.envs.base import EnvFailure
from sao_jax.envs.make import make_env
from sao_jax.envs.online_writing import (
  JudgeError,
  OnlineWriting,
  Verdict,
  faults,
  judge_by_rules,
  judge_factory,
  make_judge,
  style_of,
)
from sao_jax.lexicon import NEUTRAL, STYLES, TOPICS, WORDS
from sao_jax.types import Message, Task

TASK = Task(
  "writing:tea, rain",
  [Message(role="user", content="tea, rain")],
  {"question": "tea, rain", "topic": ("tea", "rain"), "style": "cute", "phase": 0},
)


def write(text, judge="rules", task=TASK):
  """The step that this text leads to."""

  async def main():
    env = make_env(EnvConfig(name="online_writing", judge=judge, tool=False, max_turns=1))()
    assert await env.reset(task) == task.prompt
    step = await env.step(Message(role="assistant", content=text))
    await env.close()
    await env.close()
    return step

  return asyncio.run(main())


def test_no_word_is_in_two_lists():
  words = [*TOPICS, *NEUTRAL, *(word for style in STYLES.values() for word in style)]
  assert len(words) == len(set(words)) == len(WORDS) == 58
  assert all(len(style) == 8 for style in STYLES.values())


@pytest.mark.parametrize(
  ("text", "broken"),
  [
    ("tiny tea by the soft rain.", []),
    ("  tiny tea by the soft rain.\n", []),
    ("rain in tea and.", []),  # four words; sense is not judged
    ("the tiny tea and a soft rain.", []),  # seven
    ("tiny tea by soft moon.", ["topic"]),
    ("tiny teas by soft rain.", ["topic", "lexicon"]),
    ("tea and rain.", ["length"]),
    ("the tiny tea and a soft sweet rain.", ["length"]),
    ("tiny tea and tiny rain.", ["repeat"]),
    ("tea tea and rain.", ["repeat"]),
    ("tiny tea by lovely rain.", ["lexicon"]),
    ("Tiny tea by soft rain.", ["lexicon"]),
    ("tiny tea, by soft rain.", ["topic", "lexicon"]),
    ("tiny tea  by soft rain.", ["lexicon"]),  # an empty word between two spaces
    ("tiny tea by soft rain", ["stop"]),
    ("tiny tea by soft rain..", ["topic", "lexicon"]),
    ("tiny tea by soft rain .", ["lexicon"]),
    ("tiny tea. by soft rain.", ["topic", "lexicon"]),
    ("tiny tea by soft rain.</python>", ["topic", "lexicon", "stop"]),
    ("", ["topic", "length", "lexicon", "stop"]),
    (".", ["topic", "length", "lexicon"]),
  ],
)
def test_every_rule_of_quality(text, broken):
  assert faults(("tea", "rain"), text) == broken
  step = write(text)
  assert step.metrics["quality"] == float(not broken)
  assert step.reward == step.metrics["quality"] * step.metrics["style_hit"]


@pytest.mark.parametrize(
  ("text", "style"),
  [
    ("tiny tea by the rain.", "cute"),
    ("tiny soft sweet tea.", "cute"),
    ("hexed tea by the rain.", "chuunibyou"),
    ("noble tea by jade rain.", "classical"),
    ("modal tea by novel rain.", "academic"),
    ("tiny soft tea by dark rain.", None),  # one of another style
    ("tiny tea by dark rain.", None),
    ("tea by the rain.", None),
    ("soft soft", "cute"),  # whatever its quality
    ("softly tea. by soft, rain", None),  # no word of the lexicon's
    ("", None),
  ],
)
def test_every_rule_of_style(text, style):
  assert style_of(text) == style
  for wanted in STYLES:
    task = dataclasses.replace(TASK, meta=TASK.meta | {"style": wanted})
    step = write(text, task=task)
    assert step.metrics["style_hit"] == float(style == wanted)
    shares = {name: step.metrics[f"style_{name}"] for name in STYLES}
    assert shares == {name: float(name == style) for name in STYLES}


@pytest.mark.parametrize(
  ("style", "text", "reward"),
  [
    ("cute", "tiny tea by soft rain.", 1.0),
    ("classical", "tiny tea by soft rain.", 0.0),
    ("cute", "tiny tea by soft rain", 0.0),
    ("classical", "tiny tea by soft rain", 0.0),
  ],
)
def test_one_reply_ends_it_with_quality_times_style(style, text, reward):
  step = write(text, task=dataclasses.replace(TASK, meta=TASK.meta | {"style": style, "phase": 2}))
  assert (step.messages, step.reward, step.done) == ([], reward, True)
  assert step.metrics["phase"] == 2.0


def test_it_is_single_use():
  async def main():
    env = OnlineWriting(judge_by_rules, "rules")
    with pytest.raises(RuntimeError, match="before reset"):
      await env.step(Message(role="assistant", content=""))
    await env.reset(TASK)
    with pytest.raises(RuntimeError, match="single use"):
      await env.reset(TASK)
    await env.step(Message(role="assistant", content=""))
    with pytest.raises(RuntimeError, match="after the episode was done"):
      await env.step(Message(role="assistant", content=""))

  asyncio.run(main())


def test_another_judge_is_shared_by_the_episodes_and_may_give_part_marks():
  config = EnvConfig(
    name="online_writing", judge="tests.envs.judges:lengths", tool=False, max_turn_tokens=40
  )
  make = make_env(config)

  async def main():
    steps = []
    for text in ("x" * 10, "x" * 50):
      env = make()
      await env.reset(TASK)
      steps.append(await env.step(Message(role="assistant", content=text)))
    return steps

  short, long = asyncio.run(main())
  assert (short.reward, long.reward) == (0.25 * 0.5, 0.5)
  assert short.metrics == {"calls": 1.0, "quality": 0.25, "style_hit": 0.5, "phase": 0.0}
  assert long.metrics["calls"] == 2.0


@pytest.mark.parametrize(
  ("judge", "message"),
  [
    ("nan", r"env\.judge = 'tests\.envs\.judges:nan' gave quality = nan, which is not in \[0, 1\]"),
    ("high", r"gave style = 1\.5, which is not in \[0, 1\] \(task writing:tea, rain\)"),
    ("low", r"gave quality = -0\.1, which is not"),
    ("text", r"gave quality = 'good', which is not"),
    ("metric", r"gave the metric 'tone' = inf, which is no finite number"),
    ("number", "gave a float, not a Verdict"),
    ("refused", "raised ConnectionRefusedError: port 8000"),
    ("defect", "raised KeyError: 'score'"),
  ],
)
def test_no_verdict_is_a_failure_by_name(judge, message):
  with pytest.raises(JudgeError, match=message) as error:
    write("tiny tea by soft rain.", judge=f"tests.envs.judges:{judge}")
  assert isinstance(error.value, EnvFailure)


def test_a_judge_may_name_its_failure_itself():
  with pytest.raises(EnvFailure, match=r"^the service is down$"):
    write("", judge="tests.envs.judges:unreachable")


def test_numbers_of_other_libraries_are_numbers():
  import numpy as np

  async def judge(task, text, /):
    return Verdict(np.float32(0.5), np.float64(1), {"n": np.int32(3)})

  async def main():
    env = OnlineWriting(judge, "numpy")
    await env.reset(TASK)
    return await env.step(Message(role="assistant", content=""))

  step = asyncio.run(main())
  assert (step.reward, type(step.reward)) == (0.5, float)
  assert step.metrics["n"] == 3.0


@pytest.mark.parametrize(
  ("judge", "message"),
  [
    ("no_such.module:make", "importing no_such.module raised ModuleNotFoundError.*on PYTHONPATH"),
    ("tests.envs.judges:length", r"has no function 'length'; did you mean lengths"),
    ("tests.envs.judges:NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
    ("tests.envs.judges:broken", "the factory raised OSError: no such server"),
    ("tests.envs.judges:nothing", "the factory gave a NoneType, which cannot be called"),
  ],
)
def test_a_judge_that_cannot_be_had_is_refused_at_the_start(judge, message):
  with pytest.raises(ConfigError, match=message):
    make_judge(EnvConfig(name="online_writing", judge=judge))


def test_a_judge_is_looked_up_without_being_made():
  assert judge_factory("tests.envs.judges:broken")
