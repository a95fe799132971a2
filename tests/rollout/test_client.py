"""The in-process client: sessions, incarnations, batch mode."""

import asyncio

import numpy as np
import pytest

from sao_jax.rollout.client import InProcessClient, StaleIncarnation
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.types import Sampling, Version
from tests.rollout.serving import Job, check_job, params_of, reference_logprobs, run_job, serving


def test_a_session_is_one_sequence():
  async def calls(client):
    async with client.session("a") as session:
      await session.extend([1, 2, 3])
      await session.extend(np.asarray([4, 5]))
      one = await session.sample(Sampling(4, key=(1, 1)))
      two = await session.sample(Sampling(4, key=(1, 1)))  # nothing between: goes on
      await session.close()
      await session.close()
    return one, two

  with serving() as driver:
    one, two = asyncio.run(calls(InProcessClient(driver)))
    assert driver.metrics()["prefilled_tokens"] == 4
  check_job(Job([1, 2, 3, 4, 5], Sampling(4, key=(1, 1))), one, params_of(0))
  context = [1, 2, 3, 4, 5, *one.tokens.tolist()]
  check_job(Job(context, Sampling(4, key=(1, 1))), two, params_of(0))


def test_a_completion_has_the_promised_types():
  with serving() as driver:
    completion = asyncio.run(
      run_job(InProcessClient(driver), Job([1], Sampling(5, temperature=0.7)))
    )
  assert completion.tokens.dtype == completion.policy_version.dtype == np.int32
  assert completion.logprobs.dtype == completion.sampled_logprobs.dtype == np.float32
  assert completion.temperature == 0.7
  assert (completion.stop, completion.incarnation, completion.routes.size) == ("length", 0, 0)


def test_a_newer_incarnation_ends_older_sessions_by_name():
  class Restarting(RolloutEngine):
    def generate(self, params, decode_state):
      if self._counts["steps"] == 5:
        self.store.publish(params_of(1), Version(1, 0))
      return super().generate(params, decode_state)

  async def calls(client):
    async with client.session("old") as session:
      await session.extend([1])
      with pytest.raises(StaleIncarnation, match=r"incarnation 0, .* serves incarnation 1"):
        await session.sample(Sampling(50))  # while it is being sampled
      with pytest.raises(StaleIncarnation):
        await session.sample(Sampling(50))  # and before it is placed
    async with client.session("new") as session:
      await session.extend([1])
      return await session.sample(Sampling(5))

  with serving(Restarting) as driver:
    completion = asyncio.run(calls(InProcessClient(driver)))
  assert completion.incarnation == 1
  expected = reference_logprobs([1], completion.tokens.tolist(), 1.0, params_of(1))
  assert np.abs(expected - completion.logprobs).max() <= 1e-5


def test_a_cancelled_turn_leaves_the_session_where_it_was():
  async def calls(client):
    async with client.session("a") as session:
      await session.extend([1, 2, 3])
      call = asyncio.create_task(session.sample(Sampling(80, key=(5, 5))))
      await asyncio.sleep(0.01)
      call.cancel()
      with pytest.raises(asyncio.CancelledError):
        await call
      return await session.sample(Sampling(6, key=(6, 6)))

  with serving() as driver:
    completion = asyncio.run(calls(InProcessClient(driver)))
  check_job(Job([1, 2, 3], Sampling(6, key=(6, 6))), completion, params_of(0))


def test_sessions_of_one_key_share_nothing():
  async def calls(client):
    async with client.session("same") as a, client.session("same") as b:
      await a.extend([1, 2, 3])
      await b.extend([1, 2, 3, 4])
      first = await asyncio.gather(a.sample(Sampling(4)), b.sample(Sampling(4)))
      await a.close()
      await b.extend([7])
      return *first, await b.sample(Sampling(4))

  with serving() as driver:
    one, two, three = asyncio.run(calls(InProcessClient(driver)))
  check_job(Job([1, 2, 3], Sampling(4)), one, params_of(0))
  check_job(Job([1, 2, 3, 4], Sampling(4)), two, params_of(0))
  check_job(Job([1, 2, 3, 4, *two.tokens.tolist(), 7], Sampling(4)), three, params_of(0))


def test_nothing_wakes_the_caller_before_the_sample_is_complete():
  async def calls(client):
    loop, woken = asyncio.get_running_loop(), 0
    stock = loop.call_soon_threadsafe

    def counted(*args, **kwargs):
      nonlocal woken
      woken += 1
      return stock(*args, **kwargs)

    loop.call_soon_threadsafe = counted
    await run_job(client, Job([1], Sampling(60)))
    return woken

  with serving() as driver:
    assert asyncio.run(calls(InProcessClient(driver))) == 1
