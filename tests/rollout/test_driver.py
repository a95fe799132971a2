"""The driver: cancel, failure, shutdown, races.  Nothing hangs, nothing dies, nothing is lost."""

import asyncio
import os
import random
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from sao_jax.rollout.client import InProcessClient
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.requests import DriverFailed, DriverStopped, Overloaded, RolloutRequest
from sao_jax.types import Sampling, Version
from tests.rollout.serving import (
  Job,
  check_job,
  jobs,
  make_engine,
  params_of,
  run_job,
  run_jobs,
  serving,
)

LONG = Sampling(90, key=(3, 3))


class Slow(RolloutEngine):
  """Leaves time to do something in the middle of a sample."""

  def generate(self, params, decode_state):
    time.sleep(0.01)
    return super().generate(params, decode_state)


class Failing(RolloutEngine):
  fail_at = -1

  def generate(self, params, decode_state):
    self.fail_at -= 1
    if self.fail_at == 0:
      raise RuntimeError("the device is gone")
    return super().generate(params, decode_state)


def wait_until(condition, seconds=30.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "timed out"
    time.sleep(0.002)


def test_fifty_cancelled_clients_free_their_slots_at_the_next_step():
  with serving(Slow, slots=4) as driver:
    run_jobs(InProcessClient(driver), jobs(1))  # compiled

    async def cancel_everything():
      client = InProcessClient(driver)
      tasks = [asyncio.create_task(run_job(client, Job([1 + i], LONG), f"c{i}")) for i in range(50)]
      while driver.metrics()["active"] < 4:
        await asyncio.sleep(0.005)
      await asyncio.sleep(0.05)
      for task in tasks:
        task.cancel()
      steps = driver.metrics()["steps"]
      ended = await asyncio.gather(*tasks, return_exceptions=True)
      assert all(isinstance(e, asyncio.CancelledError) for e in ended)
      while driver.metrics()["active"]:
        await asyncio.sleep(0.001)
      # One step may have been in flight, the next one frees the slots, and the at most three that
      # were already prefilled pass through them.
      assert driver.metrics()["steps"] - steps <= 5
      assert driver.open_requests == 0
      before = driver.metrics()["steps"]
      completion = await run_job(client, Job([9], Sampling(3, key=(8, 8))), "new")
      assert driver.metrics()["steps"] - before <= 8
      return completion

    completion = asyncio.run(cancel_everything())
  check_job(Job([9], Sampling(3, key=(8, 8))), completion, params_of(0))


def test_an_exception_in_generate_fails_open_requests_by_name_and_a_new_driver_starts(caplog):
  engine = make_engine(Failing)
  with RolloutDriver(engine, engine.store) as driver:
    engine.fail_at = 6
    results = run_jobs(
      InProcessClient(driver), [Job([i + 1], LONG) for i in range(9)], return_exceptions=True
    )
    assert all(isinstance(r, DriverFailed) for r in results)
    assert "RuntimeError: the device is gone" in str(results[0])
    assert isinstance(results[0].__cause__, RuntimeError)
    with pytest.raises(DriverFailed, match="the device is gone"):
      asyncio.run(run_job(InProcessClient(driver), Job([1], LONG)))
    assert driver.open_requests == 0
  assert "rollout driver thread generate-0 failed" in caplog.text
  todo = jobs(6)
  with RolloutDriver(engine, engine.store) as driver:
    for job, completion in zip(todo, run_jobs(InProcessClient(driver), todo)):
      check_job(job, completion, params_of(0))


def test_a_prompt_that_fails_in_prefill_fails_alone():
  class BadPrompt(RolloutEngine):
    def _prefill(self, request, version, view):
      if len(request.prefill_content) == 3:
        raise RuntimeError("XLA says no")
      return super()._prefill(request, version, view)

  with serving(BadPrompt) as driver:
    results = run_jobs(
      InProcessClient(driver),
      [Job([1] * (i + 1), Sampling(4)) for i in range(6)],
      return_exceptions=True,
    )
  assert "prefill failed: RuntimeError: XLA says no" in str(results[2])
  assert [len(r.tokens) for i, r in enumerate(results) if i != 2] == [4] * 5


def test_stop_ends_every_client_and_joins_every_thread():
  before = set(threading.enumerate())
  ended: list[object] = []
  with serving(Slow) as driver:
    run_jobs(InProcessClient(driver), jobs(1))

    def clients():
      todo = [Job([i + 1], LONG) for i in range(12)]
      ended.extend(run_jobs(InProcessClient(driver), todo, return_exceptions=True))

    thread = threading.Thread(target=clients)
    thread.start()
    wait_until(lambda: driver.metrics()["active"] == 4)
    began = time.monotonic()
    driver.stop()
    assert time.monotonic() - began < 5
    thread.join(10)
    assert len(ended) == 12
    assert all(isinstance(e, DriverStopped) for e in ended)
    with pytest.raises(DriverStopped):
      asyncio.run(run_job(InProcessClient(driver), Job([1], LONG)))
    driver.stop()  # again, and once more at the end of the context
  assert driver.failure is None
  assert set(threading.enumerate()) <= before | {threading.current_thread()}


def test_admission_is_bounded_and_frees_with_what_ends():
  with serving(Slow, slots=2, max_queued=3) as driver:
    requests = [RolloutRequest([1], Sampling(20), incarnation=0) for _ in range(6)]
    for request in requests[:5]:
      driver.submit(request)
    with pytest.raises(Overloaded, match=r"5 requests are open and the limit is 5 \(2 slots"):
      driver.submit(requests[5])
    requests[4].future.cancel()  # waits in the queue: gone at once
    driver.submit(requests[5])
    assert len(requests[5].future.result(60).tokens) == 20


def test_many_more_sessions_than_slots_waiting_for_tools():
  """All slots' sessions sit at a tool, and the others are served meanwhile."""

  async def everything(client):
    at_tool, gate = 0, asyncio.Event()

    async def episode(i):
      nonlocal at_tool
      async with client.session(f"s{i}") as session:
        await session.extend([i + 1, 2, 3])
        await session.sample(Sampling(3, key=(1, i)))
        at_tool += 1
        if at_tool == 64:
          gate.set()  # only once every one of 64 sessions has had its first turn on 4 slots
        await asyncio.wait_for(gate.wait(), 60)
        await session.extend([4])
        return await session.sample(Sampling(3, key=(2, i)))

    return await asyncio.gather(*[episode(i) for i in range(64)])

  with serving(slots=4) as driver:
    results = asyncio.run(everything(InProcessClient(driver)))
    metrics = driver.metrics()
  assert [len(r.tokens) for r in results] == [3] * 64
  assert metrics["resumed"] == 64
  assert metrics["parked"] >= 60


def test_a_thousand_random_publishes_cancels_and_appends():
  done = {"turns": 0, "cancelled": 0, "published": 0}
  rng = random.Random(0)

  async def episode(client, i):
    async with client.session(f"e{i}") as session:
      await session.extend([rng.randrange(80) for _ in range(rng.randrange(1, 20))])
      for _ in range(rng.randrange(1, 5)):
        call = asyncio.create_task(
          session.sample(Sampling(rng.randrange(1, 5), key=(i, 0), stop_ids=(3,)))
        )
        if rng.random() < 0.3:
          await asyncio.sleep(rng.random() * 0.005)
          call.cancel()
        try:
          completion = await call
        except asyncio.CancelledError:
          done["cancelled"] += 1
          continue
        done["turns"] += 1
        assert np.isfinite(completion.logprobs).all()
        assert (np.diff(completion.policy_version) >= 0).all()
        await session.extend([rng.randrange(80) for _ in range(rng.randrange(0, 6))])

  def going_on():
    return done["turns"] + done["cancelled"] < 1000

  async def worker(client):
    while going_on():
      await episode(client, rng.randrange(2**31))

  async def publisher(store):
    while going_on():
      done["published"] += 1
      await asyncio.to_thread(
        store.publish, params_of(done["published"] % 5), Version(0, done["published"])
      )
      await asyncio.sleep(rng.random() * 0.003)

  async def everything(driver):
    client = InProcessClient(driver)
    await asyncio.wait_for(
      asyncio.gather(publisher(driver.store), *[worker(client) for _ in range(10)]), 400
    )
    return await run_job(client, Job([5, 6], Sampling(4, key=(1, 1))), "last")

  with serving(kv="recompute", slots=3) as driver:
    driver.engine.warmup()
    completion = asyncio.run(everything(driver))
    assert driver.failure is None
    assert driver.open_requests == 0
    assert driver.metrics()["active"] == driver.metrics()["resident"] == 0
    final = driver.store.version.step
  assert min(done.values()) > 20
  check_job(Job([5, 6], Sampling(4, key=(1, 1))), completion, params_of(final % 5))


def test_the_free_slot_race_loses_nothing():
  """The stock loop asserts that a slot is busy after the last one may have been freed."""
  interval = sys.getswitchinterval()
  with serving(slots=2) as driver:
    client = InProcessClient(driver)
    run_jobs(client, jobs(2))

    async def drains():
      for i in range(200):
        assert len((await run_job(client, Job([1], Sampling(2, key=(1, i))), "x")).tokens) == 2

    sys.setswitchinterval(1e-6)
    try:
      asyncio.run(asyncio.wait_for(drains(), 120))
    finally:
      sys.setswitchinterval(interval)
    assert driver.failure is None


def test_the_race_is_survived_when_it_happens(monkeypatch):
  from sao_jax.rollout._jetstream import orchestrator

  stock, raised = orchestrator.Driver._generate_thread, []

  def racing(self, idx):
    if len(raised) < 3:
      raised.append(1)
      raise AssertionError("At this point we must have some requests inserted into the slots.")
    return stock(self, idx)

  monkeypatch.setattr(orchestrator.Driver, "_generate_thread", racing)
  with serving() as driver:
    assert len(asyncio.run(run_job(InProcessClient(driver), jobs(1)[0])).tokens) > 0
    assert driver.race_restarts == 3
    assert driver.failure is None


def python(code: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)],
    capture_output=True, text=True, timeout=400, env=os.environ, check=False,
  )  # fmt: skip


def test_importing_leaves_tensorflow_out_and_the_root_logger_alone():
  result = python(
    """
    import logging, sys
    import sao_jax.rollout.client, sao_jax.rollout.server
    root = logging.getLogger()
    assert root.level == logging.WARNING, root.level
    assert not root.handlers, root.handlers
    for name in ("tensorflow", "seqio", "torch"):
      assert name not in sys.modules, name
    """
  )
  assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_driver_that_was_never_stopped_does_not_keep_the_interpreter():
  result = python(
    """
    import asyncio
    from sao_jax.rollout.client import InProcessClient
    from sao_jax.rollout.jetstream import RolloutDriver
    from tests.rollout.serving import jobs, make_engine, run_jobs
    engine = make_engine()
    driver = RolloutDriver(engine, engine.store)
    print(len(run_jobs(InProcessClient(driver), jobs(2))))
    """
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout == "2\n"
  assert "a RolloutDriver was not stopped" in result.stderr
