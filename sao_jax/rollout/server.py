"""The gRPC server over a RolloutDriver, with JetStream's protocol, and its Prometheus metrics."""

import asyncio
import contextlib
import ipaddress
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sao_jax.rollout import wire
from sao_jax.rollout._jetstream import (
  jetstream_pb2,
  jetstream_pb2_grpc,
  orchestrator,
  server_lib,
)
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.requests import (
  COLUMNS,
  BadRequest,
  EngineFailure,
  Overloaded,
  RolloutRequest,
  StaleIncarnation,
)

_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
  (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
  (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
  (StaleIncarnation, grpc.StatusCode.FAILED_PRECONDITION),
  (EngineFailure, grpc.StatusCode.UNAVAILABLE),
)


def status_code(error: BaseException) -> grpc.StatusCode:
  return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class RolloutOrchestrator(orchestrator.LLMOrchestrator):
  """Stock servicer with per-request sampling, frames, sessions, and cancels that reach the slot."""

  _driver: RolloutDriver

  async def Decode(
    self, request: jetstream_pb2.DecodeRequest, context: Any = None
  ) -> AsyncIterator[jetstream_pb2.DecodeResponse]:
    metadata = dict(context.invocation_metadata() or ())
    if wire.CLOSE in metadata:
      self._driver.engine.forget(request.session_cache)
      return
    try:
      if metadata.get(wire.FRAMES) == "batch":
        todo = self._request(request, metadata)
        context.add_done_callback(lambda _: todo.future.cancel())
        self._driver.submit(todo)
        yield _response(wire.encode_completion(await asyncio.wrap_future(todo.future)))
      else:
        async for ids in self._streamed(request, metadata, context):
          yield _response(ids)
    except (ValueError, EngineFailure) as error:
      await context.abort(status_code(error), str(error))

  def _request(
    self,
    request: jetstream_pb2.DecodeRequest,
    metadata: dict[str, str],
    on_tokens: Callable[[list[int]], None] | None = None,
  ) -> RolloutRequest:
    if request.WhichOneof("content") != "token_content":
      raise BadRequest("this server takes token_content: prompts are tokenised by the client")
    sampling = wire.decode_sampling(metadata.get(wire.SAMPLING, "{}"), request.max_tokens)
    incarnation = metadata.get(wire.INCARNATION, str(self._driver.store.version.incarnation))
    if not incarnation.isdecimal():
      raise BadRequest(f"{wire.INCARNATION} = {incarnation!r}: a number is needed")
    return RolloutRequest(
      np.asarray(request.token_content.token_ids, np.int32),
      sampling,
      incarnation=int(incarnation),
      session=request.session_cache,
      on_tokens=on_tokens,
    )

  async def _streamed(
    self, request: jetstream_pb2.DecodeRequest, metadata: dict[str, str], context: Any
  ) -> AsyncIterator[list[int]]:
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()

    def post(ids: list[int] | None) -> None:
      with contextlib.suppress(RuntimeError):  # the server's loop is closed: nobody listens
        loop.call_soon_threadsafe(arrived.put_nowait, ids)

    todo = self._request(request, metadata, post)
    context.add_done_callback(lambda _: todo.future.cancel())
    self._driver.submit(todo)
    todo.future.add_done_callback(lambda _: post(None))
    frames = metadata.get(wire.FRAMES) == "stream"
    while (ids := await arrived.get()) is not None:
      yield ids if frames else ids[::COLUMNS]
    await asyncio.wrap_future(todo.future)  # raises what the request ended with

  async def HealthCheck(
    self, request: jetstream_pb2.HealthCheckRequest, context: Any = None
  ) -> jetstream_pb2.HealthCheckResponse:
    version = wire.encode_version(self._driver.store.version)
    await context.send_initial_metadata(((wire.VERSION, version),))
    alive = self._driver.live and self._driver.failure is None
    return jetstream_pb2.HealthCheckResponse(is_live=alive)


def _response(ids: list[int]) -> jetstream_pb2.DecodeResponse:
  content = jetstream_pb2.DecodeResponse.StreamContent
  return jetstream_pb2.DecodeResponse(
    stream_content=content(samples=[content.Sample(token_ids=ids)])
  )


class RolloutServer(server_lib.JetStreamServer):
  """Serves a driver over gRPC.  A context manager; leaving it stops the server and the driver.

  Args:
    driver: a running driver.
    host, port: where to listen; port 0 takes a free one, ``self.port`` says which.
    credentials: needed for any host but the loopback (local credentials).
    metrics_port: serves Prometheus metrics there (0: a free one, ``self.metrics_port``); None: off.
    grace: seconds that running calls get when the server stops.

  Raises:
    ValueError: a reachable host without credentials.
    OSError: the address cannot be bound.
  """

  def __init__(
    self,
    driver: RolloutDriver,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    credentials: grpc.ServerCredentials | None = None,
    metrics_port: int | None = None,
    grace: float = 1.0,
    threads: int = 16,
  ) -> None:
    if credentials is None and not _is_loopback(host):
      raise ValueError(
        f"host = {host!r} can be reached from outside: pass credentials "
        "(grpc.ssl_server_credentials, or grpc.insecure_server_credentials() on a trusted network)"
      )
    # The stock constructor binds every interface and ignores whether binding worked.
    self._driver, self._grace = driver, grace
    self._executor = futures.ThreadPoolExecutor(threads, "rollout-server")
    self._loop = asyncio.new_event_loop()
    self._loop.set_default_executor(self._executor)
    self._loop_thread = threading.Thread(
      target=self._loop.run_forever, name="rollout-server", daemon=True
    )
    self._loop_thread.start()
    self._metrics = MetricsServer(driver)
    self._stopped = False
    self._grpc_server = asyncio.run_coroutine_threadsafe(self._make(), self._loop).result()
    self.port = self._bind(host, port, credentials or grpc.local_server_credentials())
    self.address = f"{host}:{self.port}"
    self.metrics_port = None if metrics_port is None else self._metrics.start(host, metrics_port)

  async def _make(self) -> grpc.aio.Server:
    server = grpc.aio.server(self._executor)
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
      RolloutOrchestrator(driver=self._driver), server
    )
    return server

  def _bind(self, host: str, port: int, credentials: grpc.ServerCredentials) -> int:
    try:
      bound = self._grpc_server.add_secure_port(f"{host}:{port}", credentials)
    except RuntimeError as error:
      self._end_loop()
      raise OSError(f"cannot bind {host}:{port}: {error}") from error
    if not bound:
      self._end_loop()
      raise OSError(f"cannot bind {host}:{port}")
    return bound

  async def _async_stop(self) -> None:
    await self._grpc_server.stop(grace=self._grace)

  def stop(self) -> None:
    """Stops driver and server; every open call ends with UNAVAILABLE.  May be called twice."""
    if self._stopped:
      return
    self._stopped = True
    self._metrics.stop()
    self._driver.stop()
    asyncio.run_coroutine_threadsafe(self._async_stop(), self._loop).result()
    self._end_loop()

  def _end_loop(self) -> None:
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._loop_thread.join()
    self._executor.shutdown(wait=True)
    self._loop.close()

  def __enter__(self) -> "RolloutServer":
    self.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self.stop()


def _is_loopback(host: str) -> bool:
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host.strip("[]")).is_loopback
  except ValueError:
    return False


class DriverCollector(Collector):
  """Prometheus metrics read from a live driver at each scrape."""

  GAUGES = ("active", "queued", "resident", "slot_use", "row_cache_bytes")

  def __init__(self, driver: RolloutDriver) -> None:
    self._driver = driver

  def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    version = self._driver.engine.version
    yield GaugeMetricFamily("sao_policy_step", "step of the weights in use", value=version.step)
    yield GaugeMetricFamily(
      "sao_policy_incarnation", "trainer start they come from", value=version.incarnation
    )
    for name, value in self._driver.metrics().items():
      family = GaugeMetricFamily if name in self.GAUGES else CounterMetricFamily
      yield family(f"sao_{name}", f"{name.replace('_', ' ')} of the rollout engine", value=value)


class MetricsServer:
  """Serves the process's Prometheus registry (JetStream's gauges are in it) with a driver's."""

  def __init__(self, driver: RolloutDriver) -> None:
    self._collector = DriverCollector(driver)
    self._http: tuple[Any, threading.Thread] | None = None

  def start(self, host: str, port: int) -> int:
    prometheus_client.REGISTRY.register(self._collector)
    self._http = prometheus_client.start_http_server(port, addr=host)
    return self._http[0].server_port

  def stop(self) -> None:
    if self._http is not None:
      server, thread = self._http
      self._http = None
      prometheus_client.REGISTRY.unregister(self._collector)
      server.shutdown()
      server.server_close()
      thread.join()
