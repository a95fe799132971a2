"""The engine against a plain full forward: tokens exactly, log-probs to 1e-5, whatever happens to
the weights, the slots and the neighbours."""

import asyncio
import dataclasses

import numpy as np
import pytest

from sao_jax.rollout.cache import bucket_sizes, prompt_blocks
from sao_jax.rollout.client import InProcessClient
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.requests import RolloutRequest
from sao_jax.types import Sampling, Version
from tests.rollout.hybrid import hybrid_logprobs
from tests.rollout.serving import (
  MAX_LEN,
  Job,
  check_job,
  jobs,
  make_engine,
  params_of,
  play,
  reference_logprobs,
  run_job,
  run_jobs,
  serving,
)

TEMPERATURES = (0.5, 1.0, 1.5)


def seed_of(version: int) -> int:
  return version % 5


class Publishing(RolloutEngine):
  """New weights before every decode step."""

  published = 0

  def generate(self, params, decode_state):
    self.published += 1
    self.store.publish(params_of(seed_of(self.published)), Version(0, self.published))
    return super().generate(params, decode_state)


def test_concurrent_requests_equal_a_plain_sampler():
  todo = jobs(24, temperatures=TEMPERATURES)
  with serving() as driver:
    results = run_jobs(InProcessClient(driver), todo)
    for job, completion in zip(todo, results):
      check_job(job, completion, params_of(0))
      assert set(completion.policy_version.tolist()) == {0}
    metrics = driver.metrics()
  assert metrics["tokens"] == sum(len(c.tokens) for c in results)
  assert metrics["active"] == metrics["queued"] == 0


def test_several_tokens_per_step_and_more_in_flight_change_nothing():
  todo = jobs(12, seed=1, temperatures=TEMPERATURES)
  with serving(steps_per_call=3, max_inflight=2) as driver:
    for job, completion in zip(todo, run_jobs(InProcessClient(driver), todo)):
      check_job(job, completion, params_of(0))


def test_greedy_and_truncated_requests():
  greedy = Job([5, 6, 7], Sampling(10, temperature=0.0))
  truncated = Job([5, 6, 7], Sampling(10, top_k=5, top_p=0.8, key=(1, 2)))
  with serving() as driver:
    one, two = run_jobs(InProcessClient(driver), [greedy, truncated])
  check_job(greedy, one, params_of(0))
  check_job(truncated, two, params_of(0))
  assert one.temperature == 1.0
  assert not one.sampled_logprobs.any()
  assert (two.sampled_logprobs >= two.logprobs).all()  # truncation only adds mass to what is left


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_turns_equal_a_plain_forward_of_the_whole_sequence(temperature):
  async def episodes(client):
    names = [f"episode{i}" for i in range(10)]
    return await asyncio.gather(
      *[play(client, name, temperature=temperature, pause=0.01) for name in names]
    )

  with serving() as driver:
    transcripts = asyncio.run(episodes(InProcessClient(driver)))
    metrics = driver.metrics()
  assert max(t.worst(lambda _: params_of(0)) for t in transcripts) <= 1e-5
  assert metrics["resumed"] == 30  # each turn after the first starts from the row that was kept
  # Prefilled once: the prompt but its last token, and then only the observations.
  everything = sum(len(t.tokens) for t in transcripts)
  sampled = sum(len(piece.tokens) for t in transcripts for _, piece in t.pieces)
  assert metrics["prefilled_tokens"] <= everything - sampled


def test_turns_survive_eviction_of_their_rows():
  async def episodes(client):
    return await asyncio.gather(*[play(client, f"e{i}", pause=0.01) for i in range(8)])

  with serving(prefix_cache_mb=0, slots=2) as driver:
    transcripts = asyncio.run(episodes(InProcessClient(driver)))
    metrics = driver.metrics()
  assert metrics["evicted_sessions"] > 0
  assert max(t.worst(lambda _: params_of(0)) for t in transcripts) <= 1e-5


def test_recompute_gives_each_token_the_logprob_of_its_own_version():
  todo = jobs(8, seed=2, longest_prompt=20, longest_answer=60, stops=0, temperatures=TEMPERATURES)
  todo = [Job(j.prompt, dataclasses.replace(j.sampling, max_new_tokens=60)) for j in todo]
  with serving(Publishing, kv="recompute") as driver:
    results = run_jobs(InProcessClient(driver), todo)
  for job, completion in zip(todo, results):
    versions = completion.policy_version
    assert (np.diff(versions) == 1).all()  # weights really changed at every step
    for version in range(5):
      expected = reference_logprobs(
        job.prompt, completion.tokens.tolist(), job.sampling.temperature, params_of(version)
      )
      mine = versions % 5 == version
      assert np.abs(expected - completion.logprobs)[mine].max() <= 1e-5


def test_recompute_across_turns():
  async def episodes(client):
    return await asyncio.gather(*[play(client, f"e{i}", pause=0.01) for i in range(8)])

  with serving(Publishing, kv="recompute", steps_per_call=2) as driver:
    transcripts = asyncio.run(episodes(InProcessClient(driver)))
  assert max(t.worst(lambda v: params_of(seed_of(v))) for t in transcripts) <= 1e-5


def test_keep_is_the_mixture_that_sampled_the_token():
  with serving(Publishing, kv="keep") as driver:
    requests = [
      RolloutRequest(
        np.arange(3 + i, 15 + 2 * i), Sampling(40, 1.5, key=(7, i)), incarnation=0, session=str(i)
      )
      for i in range(8)
    ]
    for request in requests:
      driver.submit(request)
    results = [request.future.result(60) for request in requests]
  for request, completion in zip(requests, results):
    assert len(set(completion.policy_version.tolist())) == 40
    expected = hybrid_logprobs(
      request.prefill_content.tolist(),
      completion.tokens.tolist(),
      completion.policy_version.tolist(),
      request.prefill_version.step,
      1.5,
      lambda version: params_of(seed_of(version)),
    )
    assert np.abs(expected - completion.logprobs).max() <= 1e-5


def bits(completion):
  return completion.tokens.tolist(), completion.logprobs.view(np.int32).tolist()


def test_bits_do_not_depend_on_order_slots_or_neighbours():
  todo = jobs(10, seed=3, temperatures=TEMPERATURES)
  noise = [Job([i + 1] * 9, Sampling(50, 2.0, top_k=3, key=(99, i))) for i in range(6)]
  with serving() as driver:
    client = InProcessClient(driver)
    alone = [bits(asyncio.run(run_job(client, job))) for job in todo]
    together = [bits(c) for c in run_jobs(client, todo)]
    mixed = [bits(c) for c in run_jobs(client, [*noise, *reversed(todo)])[len(noise) :]]
  assert together == alone
  assert mixed[::-1] == alone


def test_bits_of_turns_do_not_depend_on_timing():
  async def episodes(client, pause, others):
    extra = [play(client, f"other{i}", seed=1, pause=pause) for i in range(others)]
    mine = [play(client, f"e{i}", pause=pause) for i in range(5)]
    return (await asyncio.gather(*extra, *mine))[others:]

  def flat(transcripts):
    return [(t.tokens, [bits(piece) for _, piece in t.pieces]) for t in transcripts]

  with serving() as driver:
    client = InProcessClient(driver)
    quiet = flat(asyncio.run(episodes(client, 0.0, 0)))
    busy = flat(asyncio.run(episodes(client, 0.02, 9)))
    assert driver.metrics()["parked"] > 0
  assert quiet == busy


def test_identical_weights_published_twice_leave_greedy_output_bit_equal():
  job = Job(list(range(20)), Sampling(30, temperature=0.0))
  with serving() as driver:
    client = InProcessClient(driver)
    outputs = []
    for step in (1, 2, 3):
      outputs.append(bits(asyncio.run(run_job(client, job))))
      driver.store.publish(params_of(0), Version(0, step))
  assert outputs[0] == outputs[1] == outputs[2]


def test_shared_prefix_is_prefilled_once_and_keyed_by_version():
  shared = list(range(1, 40))
  todo = [Job([*shared, 40 + i], Sampling(3, key=(1, i))) for i in range(6)]
  with serving() as driver:
    client = InProcessClient(driver)
    first = [asyncio.run(run_job(client, job)) for job in todo]
    before = driver.metrics()
    assert before["prefix_hits"] == 4  # seen once, kept at the second, found from the third on
    driver.store.publish(params_of(1), Version(0, 1))
    again = asyncio.run(run_job(client, todo[0]))
    assert driver.metrics()["prefix_hits"] == 4  # keys of other weights are never used
    asyncio.run(run_job(client, todo[1]))
    assert driver.metrics()["prefix_hits"] == 5
  for job, completion in zip(todo, first):
    check_job(job, completion, params_of(0))
  check_job(todo[0], again, params_of(1))


def test_a_sample_ends_at_the_slots_length():
  job = Job(list(range(70)), Sampling(500, key=(4, 4)))
  with serving() as driver:
    completion = asyncio.run(run_job(InProcessClient(driver), job))
  assert len(completion.tokens) == MAX_LEN - 70
  assert completion.stop == "length"
  check_job(job, completion, params_of(0))


@pytest.mark.parametrize(
  ("job", "message"),
  [
    (Job([], Sampling(4)), "a prompt of 0 tokens: this engine takes 1 to 95"),
    (Job([1] * 96, Sampling(4)), "a prompt of 96 tokens: this engine takes 1 to 95"),
    (Job([80], Sampling(4)), "80 … 80: the model has ids 0 … 79"),
    (Job([1], Sampling(0)), "max_new_tokens = 0"),
    (Job([1], Sampling(1, stop_ids=tuple(range(9)))), "9 stop ids: a request may have 8"),
    (Job([1], Sampling(1, top_p=0.0)), "top_p = 0.0"),
  ],
)
def test_requests_that_cannot_be_served_are_refused_with_both_numbers(job, message):
  with serving() as driver, pytest.raises(ValueError, match=message):
    asyncio.run(run_job(InProcessClient(driver), job))


def test_warmup_compiles_everything_that_requests_use():
  engine = make_engine(slots=3, kv="recompute")
  seen = []
  engine.warmup(lambda what, done, of: seen.append((what, done, of)))
  assert [done for _, done, _ in seen] == list(range(1, len(seen) + 1))
  assert len(seen) == 3 + 4  # three prefill lengths; take, insert, recompute, step
  functions = [engine._f.extend, engine._f.take, engine._f.insert, engine._f.step]
  functions.append(engine._f.recompute)
  compiled = [f._cache_size() for f in functions]
  with RolloutDriver(engine, engine.store) as driver:
    client = InProcessClient(driver)
    run_jobs(client, jobs(6, seed=5))
    asyncio.run(play(client, "turns"))
    driver.store.publish(params_of(1), Version(0, 1))
    run_jobs(client, jobs(3, seed=6))
  assert [f._cache_size() for f in functions] == compiled


@pytest.mark.parametrize(
  ("max_len", "sizes"),
  [(16, (16,)), (64, (16, 32)), (96, (16, 32, 64)), (4096, (16, 32, 64, 128, 256, 512))],
)
def test_buckets(max_len, sizes):
  assert bucket_sizes(max_len) == sizes


def test_prompt_blocks_cover_the_prompt_and_do_not_depend_on_its_end():
  sizes = bucket_sizes(4096)
  for n in (0, 1, 15, 16, 17, 100, 1300):
    blocks = list(prompt_blocks(n, sizes))
    assert [i for start, stop in blocks for i in range(start, stop)] == list(range(n))
  ends = [stop for _, stop in prompt_blocks(1300, sizes)]
  assert ends == [16, 32, 64, 128, 256, 512, 1024, 1300]
