"""Workers under hostile schedules: batches fill, nothing is lost, failures are named."""

import asyncio
import collections
import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sao_jax.config import Config, EnvConfig, RolloutConfig
from sao_jax.data.packing import pack
from sao_jax.envs.base import EnvFailure, Step
from sao_jax.outcome import RunFailed
from sao_jax.rollout import workers as module
from sao_jax.rollout.client import EngineFailure, StaleIncarnation
from sao_jax.rollout.queue import QueueStalled, TrajectoryQueue, WorkersDied
from sao_jax.rollout.workers import TooManyFailures, Workers
from sao_jax.types import Completion, Episode, Sampling, Task, Version
from tests.rollout.scripted import (
  CHAT,
  ScriptedClient,
  ScriptedEnv,
  ScriptedSession,
  completion,
  done,
  forever,
  says,
  task,
  tool,
)

ANSWER, CALL = "<answer>15</answer>", "<python>12+3</python>"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
  monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
  monkeypatch.setattr(module, "FIRST_BACKOFF", 0.001)


class Stream:
  """``size`` tasks over and over: serial s is task s mod size."""

  def __init__(self, size: int = 10**9) -> None:
    self.size = size

  def __getitem__(self, serial: int) -> Task:
    return task(serial % self.size)


class Clock:
  """The version being trained, as the trainer would publish it."""

  def __init__(self) -> None:
    self.version = Version(0, 0)

  def __call__(self) -> Version:
    return self.version

  def advance(self) -> None:
    self.version = Version(0, self.version.step + 1)


def make_config(batch_size: int = 4, *, group_size: int = 1, **rollout) -> Config:
  options = {"max_running": 16, "await_seconds": 20.0, "max_staleness": 1, **rollout}
  return Config(
    batch_size=batch_size,
    group_size=group_size,
    env=EnvConfig(max_tokens=64, max_turns=3),
    rollout=RolloutConfig(**options),
  )


def make_queue(config: Config) -> TrajectoryQueue:
  rollout = config.rollout
  return TrajectoryQueue(config.batch_size, rollout.max_staleness, rollout.stale, config.group_size)


def make_workers(config, queue, *, client=None, stream=None, make_env=None, clock=None, **options):
  return Workers(
    config,
    client or says(ANSWER),
    stream or Stream(),
    make_env or (lambda: ScriptedEnv([done(1.0)])),
    CHAT,
    queue,
    clock or Clock(),
    **options,
  )


class ByTask(ScriptedEnv):
  """Takes its steps from ``plan(task)`` when it is reset."""

  def __init__(self, plan) -> None:
    super().__init__([])
    self._plan = plan

  async def reset(self, task):
    self.steps = self._plan(task)
    return await super().reset(task)


def test_batches_come_sorted_and_the_next_ones_start_after_release():
  config = make_config(max_staleness=0)
  queue = make_queue(config)
  with make_workers(config, queue) as workers:
    first = queue.get(4, Version(0, 0), timeout=30)
    assert [e.task_serial for e in first] == [0, 1, 2, 3]
    time.sleep(0.1)
    assert queue.counters()["started"] == 4
    assert workers.status().running == 0
    queue.release()
    second = queue.get(4, Version(0, 1), timeout=30)
    assert [e.task_serial for e in second] == [4, 5, 6, 7]
    assert workers.status().retried == {}
  queue.check()


def test_a_failed_attempt_is_tried_again_under_the_same_serial_and_another_key():
  tries: collections.Counter[str] = collections.Counter()

  def plan(task):
    tries[task.id] += 1
    return [EnvFailure("sandbox broke")] if tries[task.id] == 1 else [done(1.0)]

  config = make_config()
  queue = make_queue(config)
  client = says(ANSWER)
  with make_workers(config, queue, client=client, make_env=lambda: ByTask(plan)) as workers:
    batch = queue.get(4, Version(0, 0), timeout=30)
    assert workers.status().retried["EnvFailure"] >= 4
    assert workers.status().quarantined == {}
  assert all(e.attempt == 1 and e.reward == 1.0 for e in batch)
  assert len({s.samplings[0].key for s in client.sessions}) == len(client.sessions)
  assert "failed/EnvFailure" not in queue.counters()
  queue.check()


def test_a_task_that_always_fails_is_quarantined_and_batches_fill_from_others():
  def plan(task):
    return [EnvFailure("its data is gone")] if task.id == "t1" else [done(1.0)]

  config = make_config()
  queue = make_queue(config)
  seen = []
  stream = Stream(3)
  with make_workers(config, queue, stream=stream, make_env=lambda: ByTask(plan)) as workers:
    for step in range(8):
      seen += queue.get(4, Version(0, step), timeout=30)
      if step == 3:  # copies of t1 that ran when it was quarantined may still fail until now
        while queue.counters()["running"]:
          time.sleep(0.01)
        failed = queue.counters()["failed"]
      queue.release()
    assert workers.status().quarantined == {"t1": "EnvFailure"}
    assert "quarantined t1 (EnvFailure)" in workers.describe()
  assert {e.trajectories[0].task_id for e in seen} == {"t0", "t2"}
  assert all(e.reward == 1.0 for e in seen)  # a failure is never a reward of 0
  assert queue.counters()["failed"] == failed >= 1
  queue.check()


def test_a_refused_task_is_not_tried_again():
  class Stream3(Stream):
    def __getitem__(self, serial):
      return task(serial % 3, "1+" * 40 + "1") if serial % 3 == 1 else task(serial % 3)

  config = make_config(2)
  queue = make_queue(config)
  with make_workers(config, queue, stream=Stream3()) as workers:
    queue.get(2, Version(0, 0), timeout=30)
    assert workers.status().quarantined == {"t1": "TaskRefused"}
    assert workers.status().retried == {}


def test_when_everything_fails_the_trainer_gets_a_sentence():
  async def reply(session, sampling):
    raise StaleIncarnation("gone")

  config = make_config(max_running=8)
  queue = make_queue(config)
  client = ScriptedClient(reply)
  with make_workers(config, queue, client=client) as workers:
    with pytest.raises(WorkersDied, match=r"failed/EngineFailure.StaleIncarnation.*quarantined t"):
      queue.get(4, Version(0, 0), timeout=30)
    with workers.frozen() as (state, _, _):
      assert state["quarantined"] == {}  # the engine's fault, not the tasks'
  queue.check()
  assert all(s.closed for s in client.sessions)

  config, queue = make_config(), make_queue(make_config())
  make_env = lambda: ScriptedEnv([EnvFailure("broken")])  # noqa: E731
  with (
    make_workers(config, queue, stream=Stream(2), make_env=make_env),
    pytest.raises(WorkersDied, match="the rollout workers died") as caught,
  ):
    queue.get(4, Version(0, 0), timeout=30)
  assert isinstance(caught.value.__cause__, TooManyFailures)
  sentence = "the rollout workers died: every task is quarantined: t"
  assert sentence in str(caught.value)  # all that the command line prints
  assert isinstance(caught.value, RunFailed)


def test_an_exception_of_the_thread_itself_reaches_the_trainer():
  class Broken(Stream):
    def __getitem__(self, serial):
      if serial == 2:
        raise KeyError("no such task")
      return super().__getitem__(serial)

  config = make_config()
  queue = make_queue(config)
  with (
    make_workers(config, queue, stream=Broken()),
    pytest.raises(WorkersDied) as caught,
  ):
    queue.get(4, Version(0, 0), timeout=30)
  assert isinstance(caught.value.__cause__, KeyError)
  assert "the rollout workers died: KeyError: 'no such task'" in str(caught.value)


def test_a_stall_names_the_episode_its_turn_and_its_last_event():
  config = make_config(1, max_staleness=0)
  queue = make_queue(config)
  env = ScriptedEnv([tool("1"), forever])
  with (
    make_workers(config, queue, client=says(CALL), make_env=lambda: env),
    pytest.raises(QueueStalled, match=r"episode 0.0.0 \(task t0\), turn 2, last event 'env step'"),
  ):
    queue.get(1, Version(0, 0), timeout=0.5)
  assert env.closed == 1
  assert queue.counters()["dropped/stopped"] == 1
  queue.check()


def test_one_hanging_task_costs_its_own_deadline_only(caplog):
  config = make_config(await_seconds=0.3, attempts=1, max_staleness=4)
  queue = make_queue(config)
  plan = lambda task: [forever] if task.id == "t2" else [done(1.0)]  # noqa: E731
  with make_workers(config, queue, make_env=lambda: ByTask(plan)) as workers:
    for step in range(3):
      assert 2 not in [e.task_serial for e in queue.get(4, Version(0, step), timeout=30)]
      queue.release()
    deadline = time.monotonic() + 10
    while "t2" not in workers.status().quarantined and time.monotonic() < deadline:
      time.sleep(0.02)
    assert workers.status().quarantined["t2"] == "EpisodeStalled"
  assert (
    "no progress within 0.3 s: episode 2.0.0 (task t2), turn 1, last event 'env s" in caplog.text
  )


def test_stopping_cancels_everything_and_frees_it():
  envs, client = [], says(CALL)

  def make_env():
    envs.append(ScriptedEnv([forever]))
    return envs[-1]

  config = make_config()
  queue = make_queue(config)
  before = threading.active_count()
  with make_workers(config, queue, client=client, make_env=make_env) as workers:
    while sum(len(s.sampled) for s in client.sessions) < 8:
      time.sleep(0.01)
    assert workers.status().running == 8
  assert threading.active_count() == before
  assert [e.closed for e in envs] == [1] * 8
  assert [s.closed for s in client.sessions] == [1] * 8
  assert queue.counters()["dropped/stopped"] == 8
  queue.check()
  with pytest.raises(WorkersDied, match="were stopped"):
    queue.get(4, Version(0, 0))


def test_drop_cancels_running_episodes_that_can_no_longer_be_in_time():
  config = make_config(2, stale="drop")
  queue, clock = make_queue(config), Clock()
  plan = lambda task: [forever] if task.id == "t0" else [done(1.0)]  # noqa: E731

  async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
    return completion(CHAT.encode_reply(ANSWER), sampling, version=clock().step)

  def train_one_step() -> None:
    queue.get(2, clock(), timeout=30)
    clock.advance()
    queue.release()

  client = ScriptedClient(reply)
  with make_workers(config, queue, client=client, make_env=lambda: ByTask(plan), clock=clock):
    train_one_step()
    time.sleep(0.1)
    assert "dropped/stale" not in queue.counters()  # at the next pop, version 1, d = 1
    train_one_step()  # at the pop for version 2, d = 2
    deadline = time.monotonic() + 10
    while "dropped/stale" not in queue.counters() and time.monotonic() < deadline:
      time.sleep(0.02)
    assert queue.counters()["dropped/stale"] == 1
    train_one_step()
    assert queue.metrics()["queue/wasted_token_share"] == pytest.approx(1 / 3)
  queue.check()


def test_groups_share_a_task_and_a_lost_member_takes_its_group_along():
  counts: collections.Counter[str] = collections.Counter()

  def plan(task):
    counts[task.id] += 1
    return [EnvFailure("broken")] if task.id == "t1" and counts["t1"] != 1 else [done(1.0)]

  config = make_config(4, group_size=2, attempts=1)
  queue = make_queue(config)
  with make_workers(config, queue, make_env=lambda: ByTask(plan)):
    batch = queue.get(4, Version(0, 0), timeout=30)
  assert [e.sort_key for e in batch] == [(0, 0), (0, 1), (2, 0), (2, 1)]
  assert [e.group for e in batch] == [0, 0, 2, 2]
  counters = queue.counters()
  assert counters["failed/EnvFailure"] == counters["dropped/group_incomplete"] == 1
  queue.check()


def test_a_stale_member_takes_its_group_along():
  config = make_config(2, group_size=2, stale="drop", max_staleness=1, max_running=4)
  queue, clock = make_queue(config), Clock()
  plans = iter([[done(1.0)], [forever]])  # one of the first group finishes and waits
  plan = lambda task: next(plans, [done(1.0)]) if task.id == "t0" else [done(1.0)]  # noqa: E731

  async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
    return completion(CHAT.encode_reply(ANSWER), sampling, version=clock().step)

  with make_workers(
    config, queue, client=ScriptedClient(reply), make_env=lambda: ByTask(plan), clock=clock
  ):
    trained = []
    while not trained or trained[-1] != (0, 0, 1):  # sampled again, as its second attempt
      batch = queue.get(2, clock(), timeout=30)
      trained.append((batch[0].task_serial, batch[0].sample, batch[0].attempt))
      clock.advance()
      queue.release()
    counters = queue.counters()
  assert counters["dropped"] == 2
  assert len(trained) == len(set(trained)) <= 6
  queue.check()


def test_groups_under_a_random_schedule_leak_nothing():
  config = make_config(
    4, group_size=2, stale="drop", max_staleness=1, attempts=1, await_seconds=0.3, max_running=8
  )
  queue, clock = make_queue(config), Clock()
  rng = np.random.default_rng(3)

  def plan(task: Task) -> list:
    pause = float(rng.choice([0.0, 0.01, 0.15], p=[0.6, 0.25, 0.15]))

    async def last() -> Step:
      await asyncio.sleep(pause)
      return done(1.0)

    fates = [last, forever, EnvFailure("random")]
    return [tool("15"), fates[rng.choice(3, p=[0.86, 0.07, 0.07])]]

  async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
    text = ANSWER if session.sampled else CALL
    return completion(CHAT.encode_reply(text), sampling, version=clock().step)

  client, steps = ScriptedClient(reply), 40
  with make_workers(config, queue, client=client, make_env=lambda: ByTask(plan), clock=clock) as w:
    for _ in range(steps):
      batch = queue.get(4, clock(), timeout=20)
      assert [e.sort_key for e in batch[::2]] == [(e.task_serial, 0) for e in batch[1::2]]
      queue.check()
      clock.advance()
      queue.release()
      with w._lock:
        running = {serial for serial, _ in w._runs}
      assert set(queue._partial) <= running | {serial for serial, _ in w._runs}
  queue.check()
  counters = queue.counters()
  assert counters["trained"] == 4 * steps
  assert {"dropped/stale", "dropped/group_incomplete", "failed/EnvFailure"} <= set(counters)
  assert queue.lost_groups() == set()
  assert len(queue._gone) <= 2 * 4  # groups that the end cut in two at most


def test_resume_repeats_and_skips_no_task():
  config = make_config(4, max_staleness=1)

  def train(incarnation: int, saved=None) -> tuple[list[int], tuple]:
    """Five batches; what was trained, and what a checkpoint would hold then."""

    async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
      return completion(CHAT.encode_reply(ANSWER), sampling, incarnation=incarnation)

    queue, trained = make_queue(config), []
    state = None
    if saved is not None:
      state, ready, over = saved
      queue.restore(ready, over, incarnation)
    with make_workers(config, queue, client=ScriptedClient(reply), resume=state) as workers:
      for _ in range(5):
        batch = queue.get(4, Version(incarnation, 0), timeout=30)
        trained += [e.task_serial for e in batch]
        queue.release()
      with workers.frozen() as frozen:
        saved = frozen
      queue.check()
    return trained, saved

  first, saved = train(1)
  second, after = train(2, saved)
  for trained, (state, ready, over) in ((first, saved), (first + second, after)):
    waiting = [episode.task_serial for episode in ready]
    everything = sorted(trained + waiting + state["pending"])
    assert everything == list(range(state["next_serial"]))  # each once, none left out
    assert over["trained"] == len(trained)


def test_synchronous_batches_do_not_depend_on_timing():
  def run(seed: int) -> list:
    rng = np.random.default_rng(seed)

    async def reply(session: ScriptedSession, sampling: Sampling) -> Completion:
      await asyncio.sleep(rng.random() * 0.01)
      draw = np.random.default_rng([*sampling.key, len(session.sampled)])
      return completion(draw.integers(8, 40, size=6), sampling)

    config = make_config(4, max_staleness=0)
    queue = make_queue(config)
    batches = []
    make_env = lambda: ScriptedEnv([tool("1"), done(1.0)])  # noqa: E731
    with make_workers(config, queue, client=ScriptedClient(reply), make_env=make_env):
      for step in range(3):
        episodes = queue.get(4, Version(0, step), timeout=30)
        version_free = dataclasses.replace(config, rollout=RolloutConfig(max_staleness=9))
        batches.append(pack(episodes, Version(0, step), version_free)[0])
        queue.release()
    return batches

  for a, b in zip(run(1), run(2), strict=True):
    for field in dataclasses.fields(a):
      np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


class Chaos:
  """A random schedule: of all attempts 20 % raise, 5 % hang, 5 % are cut; some take far longer."""

  def __init__(self, clock: Clock, seed: int) -> None:
    self.clock, self.seed = clock, seed
    self.fates: collections.Counter[str] = collections.Counter()
    self.attempts: collections.Counter[int] = collections.Counter()
    self.client = ScriptedClient(self.reply)

  def env(self) -> ByTask:
    return ByTask(self.plan)

  def plan(self, task: Task) -> list:
    self.attempts[task.serial] += 1
    rng = np.random.default_rng([self.seed, task.serial, self.attempts[task.serial]])
    fates = ["raise", "engine", "hang", "cut", "fine"]
    fate = str(rng.choice(fates, p=[0.1, 0.1, 0.05, 0.05, 0.7]))
    self.fates[fate] += 1
    pause = float(rng.choice([0.0, 0.001, 0.06], p=[0.5, 0.4, 0.1]))

    async def slow() -> Step:
      await asyncio.sleep(pause)
      return tool("15")

    last = {"raise": EnvFailure("random"), "hang": forever, "engine": EngineFailure("random")}
    return [slow, tool("1") if fate == "cut" else last.get(fate, done(1.0)), tool("2")]

  async def reply(self, session: ScriptedSession, sampling: Sampling) -> Completion:
    text = CALL if len(session.sampled) % 2 == 0 else ANSWER
    return completion(CHAT.encode_reply(text), sampling, version=self.clock().step)


def chaotic_steps(bound: int, stale: str, steps: int) -> Iterator[tuple[list[Episode], dict]]:
  config = make_config(
    8, max_staleness=bound, stale=stale, await_seconds=0.4, attempts=2, max_running=24
  )
  queue, clock = make_queue(config), Clock()
  chaos = Chaos(clock, seed=bound)
  watching = threading.Event()
  wrong: list[AssertionError] = []

  def watch() -> None:
    while not watching.wait(0.001):
      try:
        queue.check()
      except AssertionError as error:
        wrong.append(error)

  watcher = threading.Thread(target=watch)
  watcher.start()
  try:
    with make_workers(config, queue, client=chaos.client, make_env=chaos.env, clock=clock) as w:
      for _ in range(steps):
        episodes = queue.get(8, clock(), timeout=30)
        yield episodes, pack(episodes, clock(), config)[1]
        clock.advance()
        queue.release()
      assert len(w.status().retried) >= 2
  finally:
    watching.set()
    watcher.join()
  queue.check()
  assert not wrong
  assert set(chaos.fates) == {"raise", "engine", "hang", "cut", "fine"}
  assert all(s.closed == 1 for s in chaos.client.sessions)
  assert queue.counters()["trained"] == 8 * steps


@pytest.mark.parametrize(("bound", "stale"), [(0, "mask"), (1, "mask"), (1, "drop"), (4, "mask")])
def test_random_schedules_fill_batches_within_the_bound(bound, stale):
  seen: set[int] = set()
  truncated = 0
  for episodes, metrics in chaotic_steps(bound, stale, steps=15):
    assert len(episodes) == 8
    assert not seen & {e.task_serial for e in episodes}
    seen |= {e.task_serial for e in episodes}
    truncated += sum(e.status == "truncated" for e in episodes)
    assert all(e.reward == (1.0 if e.status == "done" else 0.0) for e in episodes)
    assert metrics["staleness/trained_max"] <= bound
    if bound == 0 or stale == "drop":
      assert metrics["staleness/max"] <= bound
  assert truncated > 0
