"""How episodes talk to an engine: the protocols, and the client within the engine's own process."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import numpy as np

from sao_jax.rollout.grpc_client import GrpcClient
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.requests import (
  BadRequest,
  DriverFailed,
  DriverStopped,
  EngineFailure,
  Overloaded,
  RolloutRequest,
  StaleIncarnation,
  stale_incarnation,
)
from sao_jax.types import Completion, Sampling

__all__ = [
  "BadRequest",
  "Client",
  "DriverFailed",
  "DriverStopped",
  "EngineFailure",
  "GrpcClient",
  "InProcessClient",
  "Overloaded",
  "Session",
  "StaleIncarnation",
]


class Session(Protocol):
  """One token sequence on one engine.  Calls must not overlap."""

  incarnation: int

  async def extend(self, tokens: Sequence[int]) -> None:
    """Appends prompt or observation ids."""

  async def sample(self, sampling: Sampling) -> Completion:
    """Samples a continuation and appends it.

    Raises:
      ValueError: the sequence is empty or too long for a slot (both numbers are named).
      EngineFailure: infrastructure; the episode may be tried again.
      asyncio.CancelledError: the task was cancelled; the slot is free at the next step.
    """
    ...

  async def close(self) -> None:
    """Frees what the engine keeps for the session; idempotent."""


class Client(Protocol):
  def session(self, key: str) -> AbstractAsyncContextManager[Session]:
    """A new session; ``key`` names it and, with several servers, chooses the server."""
    ...


class InProcessSession:
  """A session on a driver of this process: no text, no copies, one wake-up per completion."""

  def __init__(self, driver: RolloutDriver, key: str) -> None:
    self._driver, self._key = driver, key
    self._tokens: list[int] = []
    self.incarnation = driver.store.version.incarnation

  async def extend(self, tokens: Sequence[int]) -> None:
    self._tokens += [int(token) for token in tokens]

  async def sample(self, sampling: Sampling) -> Completion:
    now = self._driver.store.version.incarnation
    if now != self.incarnation:
      raise stale_incarnation(self.incarnation, now)
    request = RolloutRequest(
      np.asarray(self._tokens, np.int32),
      sampling,
      incarnation=self.incarnation,
      session=self._key,
    )
    self._driver.submit(request)
    completion = await asyncio.wrap_future(request.future)
    self._tokens += completion.tokens.tolist()
    return completion

  async def close(self) -> None:
    self._driver.engine.forget(self._key)


class InProcessClient:
  """Client of a driver in this process."""

  def __init__(self, driver: RolloutDriver) -> None:
    self._driver = driver
    self._serial = itertools.count()

  @contextlib.asynccontextmanager
  async def session(self, key: str) -> AsyncIterator[InProcessSession]:
    # Attempts of one episode share a key, but never a row.
    session = InProcessSession(self._driver, f"{key}#{next(self._serial)}")
    try:
      yield session
    finally:
      await session.close()
