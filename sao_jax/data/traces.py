"""Conversations for a supervised start: some good, most lazy or wrong, so that RL has a job.

Of ``good_fraction`` the policy learns to call the tool with the right expression and to report what
it said.  The rest are what weak policies do, in these shares: 70 % answer a near miss without the
tool, 15 % drop a term in the call, 10 % call it malformed and then guess, 5 % ignore what it said.
"""

import dataclasses
import random
import re
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

from sao_jax.data.chat import Chat
from sao_jax.data.tasks import TaskSource, task_stream
from sao_jax.data.writing import compose
from sao_jax.types import Message, Task

_MISSES = (-20, -10, -3, -2, -1, 1, 2, 3, 10, 20)


@dataclasses.dataclass(frozen=True)
class Trace:
  """One conversation; ``trained[i]`` tells whether the model learns to say message i."""

  messages: tuple[Message, ...]
  trained: tuple[bool, ...]
  kind: str  # good | lazy | drops_term | malformed | ignores_tool, or of writing.compose


class Traces:
  """``traces[i]`` for any i ≥ 0, deterministic in (seed, i).

  Args:
    source: tasks with an ``expression`` or a ``topic`` in their meta (generated ones).
    tool: what the tool says to a call, as the model will see it.
    good_fraction: in [0, 1].
    seed: of tasks and kinds.
  """

  def __init__(
    self, source: TaskSource, tool: Callable[[str], str], good_fraction: float, seed: int
  ) -> None:
    if not 0 <= good_fraction <= 1:
      raise ValueError(f"sft.good_fraction = {good_fraction}: must lie in [0, 1]")
    if source[0].meta.keys().isdisjoint({"expression", "topic"}):
      raise ValueError(
        "traces are made from a task's expression or topic, which generated tasks have (task.source = "
        "'arithmetic' or 'writing') and files do not: set sft.steps = 0"
      )
    self._stream, self._tool = task_stream(source, seed), tool
    self._good, self._seed = good_fraction, seed

  def __getitem__(self, index: int) -> Trace:
    task = self._stream[index]
    rng = random.Random(f"{self._seed}/trace/{index}")
    compose_turns = self._written if "topic" in task.meta else self._solved
    kind, turns = compose_turns(rng, task)
    messages = (*task.prompt, *turns)
    return Trace(messages, tuple(m["role"] == "assistant" for m in messages), kind)

  def _written(self, rng: random.Random, task: Task) -> tuple[str, list[Message]]:
    kind, text = compose(rng, task.meta["topic"], self._good)
    return kind, [Message(role="assistant", content=text)]

  def _solved(self, rng: random.Random, task: Task) -> tuple[str, list[Message]]:
    expression, answer = task.meta["expression"], task.meta["answer"]
    miss = str(int(answer) + rng.choice(_MISSES))
    kind = self._kind(rng, expression)
    match kind:
      case "good":
        turns = [*self._call(expression), _answer(self._tool(expression))]
      case "lazy":
        turns = [_answer(miss)]
      case "drops_term":
        shorter = _without_last_term(expression)
        turns = [*self._call(shorter), _answer(self._tool(shorter))]
      case "malformed":
        turns = [*self._call(expression + "="), _answer(miss)]
      case _:
        turns = [*self._call(expression), _answer(miss)]
    return kind, turns

  def _kind(self, rng: random.Random, expression: str) -> str:
    if rng.random() < self._good:
      return "good"
    share = rng.random()
    if share < 0.7 or (share < 0.85 and _without_last_term(expression) == expression):
      return "lazy"
    return "drops_term" if share < 0.85 else "malformed" if share < 0.95 else "ignores_tool"

  def _call(self, expression: str) -> list[Message]:
    return [
      Message(role="assistant", content=f"<python>{expression}</python>"),
      Message(role="tool", content=self._tool(expression)),
    ]


def _answer(text: str) -> Message:
  return Message(role="assistant", content=f"<answer>{text}</answer>")


def _without_last_term(expression: str) -> str:
  return re.sub(r"[+\-*]\d+$", "", expression)


def encode_trace(trace: Trace, chat: Chat) -> tuple[Int32[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
  """Token ids and the mask of what is trained, exactly as an episode would lay them out.

  The stop token of a trained reply is trained too: it is how the model learns to end.
  """
  first = next(i for i, m in enumerate(trace.messages) if m["role"] == "assistant")
  tokens = chat.encode_prompt(trace.messages[:first])
  mask = [False] * len(tokens)
  pending: list[Message] = []
  for message, trained in zip(trace.messages[first:], trace.trained[first:]):
    if message["role"] != "assistant":
      pending.append(message)
      continue
    observation = chat.encode_observation(pending) if pending else []
    reply = chat.encode_reply(message["content"])
    tokens += observation + reply
    mask += [False] * len(observation) + [trained] * len(reply)
    pending = []
  return np.asarray(tokens, np.int32), np.asarray(mask, bool)
