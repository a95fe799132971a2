"""Labelled solutions of a file: episodes that value pretraining regresses before any rollout.

One JSON object a line, ``.gz`` or not, in either of two forms::

    {"question": "…", "solution": "…", "correct": true}             "id" is optional
    {"question": "…", "ground_truth": "…", "<model>": {"solution": "…", "is_correct": true}, …}

The second is that of GSM8K's example_model_solutions: each object with those two keys is a solution.
"""

import dataclasses
import functools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.config import TaskConfig
from sao_jax.data.chat import Chat
from sao_jax.data.conversations import encode_reply, supervised_episode
from sao_jax.data.lines import read_lines
from sao_jax.types import Episode, Message

HELD_OUT = 8  # one question of so many

Numbered = list[tuple[int, "Solution"]]


@dataclasses.dataclass(frozen=True)
class Solution:
  """One attempt at one question, and whether it ended in the right answer."""

  id: str
  question: str
  solution: str
  correct: bool


def read_solutions(path: str) -> list[Solution]:
  """All solutions of a file, in its order.  ValueError, with file and line, for any other form."""
  return _read(path)[0]


def solution_episodes(
  path: str,
  chat: Chat,
  task: TaskConfig,
  max_tokens: int,
  max_solutions: int,
  seed: int,
  report: Callable[[str], None] = print,
) -> tuple[list[Episode], list[Episode], str]:
  """Solutions as if the policy had sampled them: reward 1 or 0 for the last token.

  An eighth of the questions is held out with all their solutions, whatever ``max_solutions``.  The
  rest is in one shuffled order, of which training takes the start: a smaller corpus is a part of a
  larger one.

  Args:
    path: see the module.
    chat: encodes ``task.prompt`` with the question, and the solution as the reply.
    task: only ``prompt`` is read.
    max_tokens: longest episode; longer ones are counted and left out.
    max_solutions: most to train on; 0 = all.
    seed: of the split and of the order.
    report: called with one line that counts what was read.

  Returns:
    (training, held out, sha256 of the file's bytes).

  Raises:
    ValueError: a bad line, a prompt without ``{question}``, or nothing left on either side.
  """
  if "{question}" not in task.prompt:
    raise ValueError(f"task.prompt = {task.prompt!r} has no {{question}} in it")
  solutions, fingerprint = _read(path)
  pool, rest = _split(solutions, seed)
  encode = functools.partial(_episode, chat=chat, prompt=task.prompt, max_tokens=max_tokens)
  training, long = _take(pool, encode, max_solutions)
  testing, longer = _take(rest, encode, 0)
  correct = sum(s.correct for s in solutions) / len(solutions)
  text = (
    f"{path}: {len(solutions)} solutions, {correct:.0%} correct; {len(training)} to train on, "
    f"{len(testing)} held out, {long + longer} left out as longer than {max_tokens} tokens"
  )
  if not training or not testing:
    raise ValueError(f"{text}. Nothing is left of a part: raise env.max_tokens")
  report(text)
  return training, testing, fingerprint


def _read(path: str) -> tuple[list[Solution], str]:
  rows, fingerprint = read_lines(path, _parse)
  name = os.path.basename(path)
  solutions = [
    dataclasses.replace(found, id=":".join(filter(None, (name, str(line), found.id))))
    for line, row in rows
    for found in row
  ]
  return solutions, fingerprint


def _parse(row: Any) -> list[Solution]:
  if not isinstance(row, dict):
    raise ValueError(f"expected an object, found {type(row).__name__}")
  question = _text(row, "question")
  if "solution" in row or "correct" in row:
    correct = _label(row, "correct")
    return [Solution(str(row.get("id", "")), question, _text(row, "solution"), correct)]
  solutions = [
    Solution(model, question, _text(value, "solution"), _label(value, "is_correct"))
    for model, value in row.items()
    if isinstance(value, dict) and {"solution", "is_correct"} <= value.keys()
  ]
  if not solutions:
    raise ValueError(
      "expected question, solution and correct, or question and {solution, is_correct} of one model "
      f"or more, found {sorted(row)}"
    )
  return solutions


def _text(row: dict, key: str) -> str:
  value = row.get(key)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{key} = {value!r}: must be text")
  return value


def _label(row: dict, key: str) -> bool:
  value = row.get(key)
  if not isinstance(value, bool | int) or value not in (0, 1):
    raise ValueError(f"{key} = {value!r}: must be true or false, 1 or 0")
  return bool(value)


def _key(solution: Solution) -> str:
  return " ".join(solution.question.split())


def _split(solutions: list[Solution], seed: int) -> tuple[Numbered, Numbered]:
  """Numbered solutions, shuffled for training and in the file's order held out."""
  questions = sorted({_key(s) for s in solutions})
  if len(questions) < 2:
    raise ValueError("all solutions are of one question: none could be held out")
  rng = random.Random(f"{seed}/solutions")
  held_out = set(rng.sample(questions, max(len(questions) // HELD_OUT, 1)))
  numbered = list(enumerate(solutions))
  training = [pair for pair in numbered if _key(pair[1]) not in held_out]
  rng.shuffle(training)
  return training, [pair for pair in numbered if _key(pair[1]) in held_out]


def _take(
  part: Numbered, encode: Callable[[int, Solution], Episode | None], most: int
) -> tuple[list[Episode], int]:
  """The first ``most`` episodes (0: all) and how many were too long on the way."""
  taken: list[Episode] = []
  for n, (index, solution) in enumerate(part):
    if most and len(taken) == most:
      return taken, n - most
    if (episode := encode(index, solution)) is not None:
      taken.append(episode)
  return taken, len(part) - len(taken)


def _episode(
  index: int, solution: Solution, *, chat: Chat, prompt: str, max_tokens: int
) -> Episode | None:
  """The solution as an episode; None where it is longer than ``max_tokens``."""
  # Not str.format: a prompt may hold braces of its own (\boxed{}).
  text = prompt.replace("{question}", solution.question)
  if chat.fewest_tokens(len(text) + len(solution.solution)) > max_tokens:
    return None
  try:
    asked = chat.encode_prompt([Message(role="user", content=text)])
    reply = encode_reply(chat, solution.solution)
  except ValueError as error:
    raise ValueError(f"{solution.id}: {error}") from None
  if (size := len(asked) + len(reply)) > max_tokens:
    return None
  tokens = np.asarray(asked + reply, np.int32)
  mask = np.arange(size) >= len(asked)
  return supervised_episode(tokens, mask, index, name=solution.id, reward=float(solution.correct))
