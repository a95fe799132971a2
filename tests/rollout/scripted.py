"""Clients and environments whose every move a test writes down: real protocols, no engine."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np

from sao_jax.config import ChatConfig
from sao_jax.data.chat import make_chat
from sao_jax.envs.base import Step
from sao_jax.types import Completion, Message, Sampling, Task

CHAT = make_chat(ChatConfig())


def task(serial: int = 0, prompt: str = "12+3") -> Task:
  return Task(f"t{serial}", [Message(role="user", content=prompt)], {}, serial)


def completion(
  tokens: Sequence[int], sampling: Sampling, *, version: int = 0, incarnation: int = 0
) -> Completion:
  """What an engine makes of these ids: cut at the cap, else ended by a stop token."""
  kept = np.asarray(tokens, np.int32)[: sampling.max_new_tokens]
  ended = len(kept) and int(kept[-1]) in sampling.stop_ids
  return Completion(
    tokens=kept,
    logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32) / 64,
    sampled_logprobs=-np.arange(1, len(kept) + 1, dtype=np.float32) / 64,
    policy_version=np.full(len(kept), version, np.int32),
    temperature=sampling.temperature,
    stop="stop" if ended else "length",
    incarnation=incarnation,
  )


Reply = Callable[["ScriptedSession", Sampling], Awaitable[Completion]]


class ScriptedSession:
  incarnation = 0

  def __init__(self, key: str, reply: Reply) -> None:
    self.key, self._reply = key, reply
    self.extended: list[list[int]] = []
    self.samplings: list[Sampling] = []
    self.sampled: list[list[int]] = []
    self.closed = 0

  async def extend(self, tokens: Sequence[int]) -> None:
    self.extended.append(list(tokens))

  async def sample(self, sampling: Sampling) -> Completion:
    self.samplings.append(sampling)
    result = await self._reply(self, sampling)
    self.sampled.append(result.tokens.tolist())
    return result

  async def close(self) -> None:
    self.closed += 1


class ScriptedClient:
  """Every session samples from ``reply(session, sampling)``."""

  def __init__(self, reply: Reply) -> None:
    self._reply = reply
    self.sessions: list[ScriptedSession] = []

  @contextlib.asynccontextmanager
  async def session(self, key: str) -> AsyncIterator[ScriptedSession]:
    session = ScriptedSession(key, self._reply)
    self.sessions.append(session)
    try:
      yield session
    finally:
      await session.close()


def says(*replies: str) -> ScriptedClient:
  """A client whose sessions give these texts, one a turn, the last one for ever."""

  async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
    text = replies[min(len(session.sampled), len(replies) - 1)]
    return completion(CHAT.encode_reply(text), sampling)

  return ScriptedClient(reply)


@dataclasses.dataclass
class ScriptedEnv:
  """Goes through ``steps``; an exception among them is raised, a coroutine function is awaited."""

  steps: Sequence[Step | Exception | Callable[[], Awaitable[Step]]]
  replies: list[str] = dataclasses.field(default_factory=list)
  closed: int = 0

  async def reset(self, task: Task) -> list[Message]:
    return task.prompt

  async def step(self, reply: Message) -> Step:
    step = self.steps[len(self.replies)]
    self.replies.append(reply["content"])
    if isinstance(step, Exception):
      raise step
    return step if isinstance(step, Step) else await step()

  async def close(self) -> None:
    self.closed += 1


def tool(content: str, reward: float = 0.0, **metrics: float) -> Step:
  return Step([Message(role="tool", content=content)], reward, False, metrics)


def done(reward: float, **metrics: float) -> Step:
  return Step([], reward, True, metrics)


async def forever() -> Step:
  await asyncio.Event().wait()
  raise AssertionError("unreachable")
