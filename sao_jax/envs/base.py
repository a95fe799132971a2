"""What an environment is: single use, asynchronous, speaks messages and knows no tokens."""

import dataclasses
from typing import Protocol

from sao_jax.types import Message, Task


class EnvFailure(Exception):
  """The infrastructure failed: a sandbox service is broken, a remote environment is gone.

  Never a reward: the episode is retried and counted.  What the model's own code does wrong
  (crashes, runs out of time or memory) is an observation instead.
  """


@dataclasses.dataclass(frozen=True)
class Step:
  """What one reply of the model led to.

  ``messages`` is the observation (empty when ``done``), ``reward`` is what this reply earned and
  ``metrics`` are numbers about it that are summed over the episode.
  """

  messages: list[Message]
  reward: float
  done: bool
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class Env(Protocol):
  """One episode of one task.  Raises EnvFailure for infrastructure only."""

  async def reset(self, task: Task) -> list[Message]:
    """Starts the episode and returns the prompt."""

  async def step(self, reply: Message) -> Step:
    """Takes one reply of the model.  Calling it after ``done`` is an error of the caller."""

  async def close(self) -> None:
    """Frees what the episode held; may be called more than once, and without a reset."""
