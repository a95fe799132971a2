"""The client of a RolloutServer in another process."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from sao_jax.rollout import wire
from sao_jax.rollout._jetstream import jetstream_pb2, jetstream_pb2_grpc
from sao_jax.rollout.requests import BadRequest, EngineFailure, Overloaded, StaleIncarnation
from sao_jax.types import Completion, Sampling

_ERRORS: dict[grpc.StatusCode, type[Exception]] = {
  grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
  grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
  grpc.StatusCode.FAILED_PRECONDITION: StaleIncarnation,
}


def _raised(error: grpc.aio.AioRpcError) -> Exception:
  kind = _ERRORS.get(error.code())
  details = error.details() or "no details"
  return kind(details) if kind else EngineFailure(f"{error.code().name}: {details}")


class GrpcSession:
  """A session on a server.  Each sample sends the whole sequence of ids: the server finds the row
  it kept for the session by them, and prefills again if it kept none."""

  def __init__(self, stub: Any, key: str, incarnation: int) -> None:
    self._stub, self._key = stub, key
    self._tokens: list[int] = []
    self._sampled = False
    self.incarnation = incarnation

  async def extend(self, tokens: Sequence[int]) -> None:
    self._tokens += [int(token) for token in tokens]

  async def sample(self, sampling: Sampling) -> Completion:
    request = jetstream_pb2.DecodeRequest(
      session_cache=self._key,
      max_tokens=sampling.max_new_tokens,
      token_content=jetstream_pb2.DecodeRequest.TokenContent(token_ids=self._tokens),
    )
    metadata = (
      (wire.SAMPLING, wire.encode_sampling(sampling)),
      (wire.FRAMES, "batch"),
      (wire.INCARNATION, str(self.incarnation)),
    )
    self._sampled = True
    ids: list[int] = []
    try:
      async for response in self._stub.Decode(request, metadata=metadata):
        ids += response.stream_content.samples[0].token_ids
    except grpc.aio.AioRpcError as error:
      raise _raised(error) from error
    completion = wire.decode_completion(ids, sampling, self.incarnation)
    self._tokens += completion.tokens.tolist()
    return completion

  async def close(self) -> None:
    if not self._sampled:
      return
    self._sampled = False
    request = jetstream_pb2.DecodeRequest(session_cache=self._key)
    # A server that cannot be told forgets the row by itself, once its memory is needed.
    with contextlib.suppress(grpc.aio.AioRpcError):
      async for _ in self._stub.Decode(request, metadata=((wire.CLOSE, "1"),), timeout=5.0):
        continue


class GrpcClient:
  """Client of one server; use it as an async context manager, or ``await close()``.

  Belongs to the event loop that first opens a session on it.

  Args:
    address: "host:port".
    credentials: None: local credentials, for a server on this machine.
  """

  def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
    self.address = address
    self._credentials = credentials
    self._channel: grpc.aio.Channel | None = None
    self._stub: Any = None

  def _connected(self) -> Any:
    if self._channel is None:
      credentials = self._credentials or grpc.local_channel_credentials()
      self._channel = grpc.aio.secure_channel(self.address, credentials)
      self._stub = jetstream_pb2_grpc.OrchestratorStub(self._channel)
    return self._stub

  @contextlib.asynccontextmanager
  async def session(self, key: str) -> AsyncIterator[GrpcSession]:
    """Opens a session under the server's present incarnation.

    Raises:
      EngineFailure: the server does not answer, or its driver has failed.
    """
    stub = self._connected()
    call = stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=10.0)
    try:
      health, metadata = await call, await call.initial_metadata()
    except grpc.aio.AioRpcError as error:
      raise _raised(error) from error
    if not health.is_live:
      raise EngineFailure(f"the rollout server at {self.address} is up, but its driver is not")
    version = wire.decode_version(dict(metadata)[wire.VERSION])
    # Attempts of one episode share a key, but never a row.
    session = GrpcSession(stub, f"{key}#{secrets.token_hex(8)}", version.incarnation)
    try:
      yield session
    finally:
      await asyncio.shield(session.close())

  async def close(self) -> None:
    if self._channel is not None:
      await self._channel.close()
      self._channel = None

  async def __aenter__(self) -> "GrpcClient":
    return self

  async def __aexit__(self, *exc: object) -> None:
    await self.close()
