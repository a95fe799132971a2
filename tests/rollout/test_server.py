"""gRPC: the same tokens and log-probs as in-process, over stock stubs and over our client."""

import asyncio
import json
import re
import socket
import threading
import time
import urllib.request

import grpc
import numpy as np
import pytest

from sao_jax.rollout import wire
from sao_jax.rollout._jetstream import (
  JetstreamMetricsCollector,
  jetstream_pb2,
  jetstream_pb2_grpc,
)
from sao_jax.rollout.client import BadRequest, EngineFailure, GrpcClient, StaleIncarnation
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.server import RolloutServer
from sao_jax.types import Sampling, Version
from tests.rollout.serving import Job, check_job, jobs, make_engine, params_of, play, run_job


class Slow(RolloutEngine):
  def generate(self, params, decode_state):
    time.sleep(0.01)
    return super().generate(params, decode_state)


@pytest.fixture
def server():
  engine = make_engine()
  with RolloutDriver(engine, engine.store) as driver, RolloutServer(driver) as running:
    yield running


def with_client(server, calls):
  async def everything():
    async with GrpcClient(server.address) as client:
      return await calls(client)

  return asyncio.run(everything())


def stock(server, **metadata):
  """Calls Decode with the generated stubs; returns the ids of each message."""

  async def call(request):
    async with grpc.aio.secure_channel(server.address, grpc.local_channel_credentials()) as channel:
      stub = jetstream_pb2_grpc.OrchestratorStub(channel)
      pairs = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
      return [
        list(response.stream_content.samples[0].token_ids)
        async for response in stub.Decode(request, metadata=pairs)
      ]

  return lambda request: asyncio.run(call(request))


def token_request(tokens, max_tokens):
  content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)
  return jetstream_pb2.DecodeRequest(token_content=content, max_tokens=max_tokens)


def test_concurrent_requests_equal_a_plain_sampler(server):
  todo = jobs(24, temperatures=(0.5, 1.0, 1.5))

  async def calls(client):
    return await asyncio.gather(*[run_job(client, job, f"j{i}") for i, job in enumerate(todo)])

  for job, completion in zip(todo, with_client(server, calls)):
    check_job(job, completion, params_of(0))


def test_turns_keep_their_rows(server):
  async def calls(client):
    return await asyncio.gather(*[play(client, f"e{i}", temperature=1.5) for i in range(8)])

  transcripts = with_client(server, calls)
  assert max(t.worst(lambda _: params_of(0)) for t in transcripts) <= 1e-5
  metrics = server._driver.metrics()
  assert metrics["resumed"] == 24
  assert metrics["resident"] == 0  # closing a session reaches the server
  assert metrics["row_cache_bytes"] == 0


def test_stock_stubs_get_a_stream_of_frames_or_of_plain_ids(server):
  job = Job([5, 6, 7], Sampling(6, temperature=0.5, key=(1, 2)))
  sampling = wire.encode_sampling(job.sampling)
  messages = stock(server, x_sao_sampling=sampling, x_sao_frames="stream")(
    token_request(job.prompt, 6)
  )
  assert [len(ids) for ids in messages] == [4] * 6
  completion = wire.decode_completion([i for ids in messages for i in ids], job.sampling, 0)
  check_job(job, completion, params_of(0))
  plain = stock(server, x_sao_sampling=sampling)(token_request(job.prompt, 6))
  assert plain == [[token] for token in completion.tokens.tolist()]
  assert len(stock(server)(token_request([1], 4))) == 4  # nothing but the stock protocol


@pytest.mark.parametrize(
  ("request_", "metadata", "code", "message"),
  [
    (token_request([1] * 200, 4), {}, "INVALID_ARGUMENT", "200 tokens: this engine takes 1 to 95"),
    (token_request([], 4), {}, "INVALID_ARGUMENT", "a prompt of 0 tokens"),
    (token_request([1], 4), {"x_sao_sampling": "{"}, "INVALID_ARGUMENT", "x-sao-sampling"),
    (token_request([1], 4), {"x_sao_sampling": "[]"}, "INVALID_ARGUMENT", "x-sao-sampling"),
    (token_request([1], 4), {"x_sao_sampling": '{"temprature": 1}'}, "INVALID_ARGUMENT",
     "unknown fields temprature"),
    (token_request([1], 4), {"x_sao_sampling": '{"key": [1, -1]}'}, "INVALID_ARGUMENT", "key ="),
    (token_request([1], 4), {"x_sao_sampling": '{"temperature": NaN}'}, "INVALID_ARGUMENT",
     "temperature = nan"),
    (token_request([1], 4), {"x_sao_incarnation": "7"}, "FAILED_PRECONDITION", "incarnation 7"),
    (token_request([1], 4), {"x_sao_incarnation": "x"}, "INVALID_ARGUMENT", "incarnation"),
    (jetstream_pb2.DecodeRequest(max_tokens=3), {}, "INVALID_ARGUMENT", "token_content"),
    (jetstream_pb2.DecodeRequest(
      max_tokens=3, text_content=jetstream_pb2.DecodeRequest.TextContent(text="hello")),
     {}, "INVALID_ARGUMENT", "token_content"),
  ],
)  # fmt: skip
def test_bad_requests_are_refused_by_code_and_name(server, request_, metadata, code, message):
  with pytest.raises(grpc.aio.AioRpcError, match=re.escape(message)) as raised:
    stock(server, **metadata)(request_)
  assert raised.value.code().name == code
  assert server._driver.failure is None


def test_errors_come_back_as_the_same_types(server):
  async def calls(client):
    with pytest.raises(BadRequest, match="96 tokens: this engine takes 1 to 95"):
      await run_job(client, Job([1] * 96, Sampling(1)))
    async with client.session("old") as session:
      assert session.incarnation == 0
      await session.extend([1, 2])
      await session.sample(Sampling(2))
      server._driver.store.publish(params_of(1), Version(3, 0))
      with pytest.raises(StaleIncarnation, match="incarnation 0, but the engine now serves"):
        await session.sample(Sampling(2))
    async with client.session("new") as session:
      assert session.incarnation == 3
      await session.extend([1, 2])
      assert (await session.sample(Sampling(2))).incarnation == 3

  with_client(server, calls)


def test_cancelled_calls_free_their_slots():
  engine = make_engine(Slow)
  with RolloutDriver(engine, engine.store) as driver, RolloutServer(driver) as server:

    async def calls(client):
      await run_job(client, Job([1], Sampling(2)))
      tasks = [
        asyncio.create_task(run_job(client, Job([1 + i], Sampling(90)), f"c{i}")) for i in range(20)
      ]
      while driver.metrics()["active"] < 4:
        await asyncio.sleep(0.005)
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      deadline = time.monotonic() + 5
      while driver.open_requests or driver.metrics()["active"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
      return await run_job(client, Job([9], Sampling(3, key=(8, 8))))

    completion = with_client(server, calls)
  check_job(Job([9], Sampling(3, key=(8, 8))), completion, params_of(0))


def test_stopping_with_calls_in_flight_names_the_reason_and_leaves_no_thread():
  before = set(threading.enumerate())
  engine = make_engine(Slow)
  driver = RolloutDriver(engine, engine.store)
  server = RolloutServer(driver)
  server.start()

  async def calls(client):
    await run_job(client, Job([1], Sampling(2)))
    tasks = [
      asyncio.create_task(run_job(client, Job([1 + i], Sampling(90)), f"c{i}")) for i in range(6)
    ]
    while driver.metrics()["active"] < 4:
      await asyncio.sleep(0.005)
    await asyncio.to_thread(server.stop)
    return await asyncio.gather(*tasks, return_exceptions=True)

  began = time.monotonic()
  ended = with_client(server, calls)
  assert time.monotonic() - began < 60
  assert all(isinstance(e, EngineFailure) for e in ended), ended
  assert any("the rollout driver was stopped" in str(e) for e in ended)
  left = {t for t in set(threading.enumerate()) - before if not t.daemon}
  assert not left


def test_no_server_is_a_named_failure():
  with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{unused.getsockname()[1]}"

  async def call():
    async with GrpcClient(address) as client:
      await run_job(client, Job([1], Sampling(1)))

  with pytest.raises(EngineFailure, match="UNAVAILABLE"):
    asyncio.run(call())


def test_addresses(server):
  with pytest.raises(ValueError, match="can be reached from outside: pass credentials"):
    RolloutServer(server._driver, host="0.0.0.0")
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    with pytest.raises(OSError, match="cannot bind"):
      RolloutServer(server._driver, port=taken.getsockname()[1])


def test_metrics_are_served_for_prometheus():
  engine = make_engine()
  with (
    RolloutDriver(engine, engine.store, metrics_collector=JetstreamMetricsCollector()) as driver,
    RolloutServer(driver, metrics_port=0) as server,
  ):
    with_client(server, lambda client: run_job(client, Job([1, 2], Sampling(5))))
    driver.store.publish(params_of(1), Version(2, 9))
    with_client(server, lambda client: run_job(client, Job([1, 2], Sampling(5))))
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
  values = {line.split()[0]: line.split()[1] for line in text.splitlines() if line[0] != "#"}
  assert values["sao_policy_step"] == "9.0"
  assert values["sao_policy_incarnation"] == "2.0"
  assert values["sao_tokens_total"] == "10.0"
  assert values["sao_active"] == values["sao_queued"] == "0.0"
  assert any(name.startswith("jetstream_prefill_backlog_size") for name in values)
  assert any(name.startswith("jetstream_slots_available_percentage") for name in values)


def test_sampling_travels_exactly():
  sampling = Sampling(7, 0.3, 5, 0.9, (1, 2), (2**32 - 1, 0))
  assert wire.decode_sampling(wire.encode_sampling(sampling), 7) == sampling
  drawn = wire.decode_sampling(json.dumps({}), 7)
  assert drawn != wire.decode_sampling(json.dumps({}), 7)  # without a key: one of the server's
  assert np.asarray(drawn.key, np.uint32).tolist() == list(drawn.key)
