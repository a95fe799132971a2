"""The rollout side of a run: weights, engine, driver, client, sandbox and one event loop."""

import asyncio
import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sao_jax.config import Config, ConfigError, ModelConfig
from sao_jax.data.chat import Chat
from sao_jax.envs.base import EnvFailure
from sao_jax.envs.make import make_env
from sao_jax.envs.sandbox import make_sandbox, unavailable
from sao_jax.models.decode import decode_view
from sao_jax.outcome import RunFailed
from sao_jax.rollout.client import EngineFailure, InProcessClient
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.episode import (
  EpisodeLimits,
  EpisodeStalled,
  run_episode,
  sampling_key,
)
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.weights import WeightStore
from sao_jax.types import Episode, Sampling, Task, Version

log = logging.getLogger(__name__)

FIRST = Version(0, 0)
END_SECONDS = 10.0  # for cancelled episodes to let go of their tools
POLL_SECONDS = 0.2  # how soon a run that is asked to stop does


class Stopped(Exception):
  """``run`` was given up because ``stop`` was set."""


class RolloutService:
  """Serves one policy to episodes in this process; a context manager.

  Args:
    config: reads ``rollout``, ``env``, ``sandbox``.
    model: of the policy.
    params: its parameters.
    chat: messages ↔ tokens.
    version: of ``params``.
    stop: ``run`` raises Stopped when it is set.

  Attributes:
    client: opens sessions on the engine.
    make_env: a new single-use environment.
    store: the weights that the engine reads, with their version.
  """

  def __init__(
    self,
    config: Config,
    model: ModelConfig,
    params: Any,
    chat: Chat,
    version: Version = FIRST,
    stop: threading.Event | None = None,
  ):
    if problem := unavailable(config.sandbox):
      raise ConfigError(problem)
    self.config, self.chat, self.stop = config, chat, stop or threading.Event()
    if config.rollout.compute_dtype:
      model = dataclasses.replace(model, compute_dtype=config.rollout.compute_dtype)
    view = jax.jit(lambda p: decode_view(p, model))
    # The engine decodes on one device, wherever the trainer's parameters are.
    where = jax.sharding.make_single_device_sharding(jax.local_devices()[0])
    self.store = WeightStore(params, version, transform=view, sharding=where)
    self.engine = RolloutEngine(model, config.rollout, self.store, pad_id=chat.pad_id)
    self.sandbox = make_sandbox(config.sandbox)
    self.make_env = make_env(config.env, self.sandbox)

  def __enter__(self) -> "RolloutService":
    self.driver = RolloutDriver(
      self.engine, self.store, max_queued=self.config.rollout.max_queued
    ).__enter__()
    self.client = InProcessClient(self.driver)
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, name="episodes", daemon=True)
    self._thread.start()
    return self

  def __exit__(self, *exc) -> None:
    asyncio.run_coroutine_threadsafe(_end_other_tasks(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()
    self.driver.__exit__(*exc)
    self.sandbox.close()

  def version(self) -> Version:
    return self.store.current()[0]

  def publish(self, params: Any, step: int) -> None:
    """New weights for the running engine; they are copied before this returns."""
    self.store.publish(params, Version(self.version().incarnation, step))

  def metrics(self) -> dict[str, float]:
    return self.engine.metrics() | {"slots": float(self.engine.slots)}

  def run(
    self,
    tasks: Sequence[Task],
    *,
    temperature: float,
    seed: int,
    samples: int = 1,
    top_k: int = 0,
    top_p: float = 1.0,
    on_done: Callable[[int], None] | None = None,
  ) -> list[Episode]:
    """Runs every task ``samples`` times, ``max_running`` at once; results in the tasks' order.

    Workers may use the engine meanwhile: as few episodes run at once as its queue has room for
    beside theirs.  An episode that infrastructure failed is tried again under the same key,
    ``rollout.attempts`` times in all; then RunFailed is raised, since an evaluation with holes
    would not be comparable.

    Args:
      tasks: their serials tell their sampling keys apart.
      temperature: of all turns; 0 is greedy.
      seed: of the sampling keys, with the task's serial and the sample.
      samples: rollouts of each task.
      top_k: 0 switches it off.
      top_p: 1 switches it off.
      on_done: called on another thread with the number of finished episodes, after each.

    Raises:
      RunFailed: the attempts of an episode are used up.
      Stopped: ``stop`` was set meanwhile.
    """
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    future = asyncio.run_coroutine_threadsafe(
      self._run(tasks, sampling, seed, samples, on_done), self._loop
    )
    try:
      while not self.stop.is_set():
        if concurrent.futures.wait([future], POLL_SECONDS).done:
          return future.result()
    except BaseExceptionGroup as group:
      raise group.exceptions[0] from group
    future.cancel()
    raise Stopped(f"stopped with {len(tasks)} tasks under way")

  async def _run(self, tasks, sampling, seed, samples, on_done) -> list[Episode]:
    rollout = self.config.rollout
    limits = EpisodeLimits.from_config(self.config.env, rollout)
    room = rollout.slots + rollout.max_queued - rollout.max_running
    gate = asyncio.Semaphore(max(1, min(rollout.max_running, room)))
    done = 0

    async def one(task: Task, sample: int) -> Episode:
      nonlocal done
      async with gate:
        episode = await self._attempts(task, sample, sampling, seed, limits)
      done += 1
      if on_done is not None:
        on_done(done)
      return episode

    async with asyncio.TaskGroup() as group:  # one that fails for good cancels the others
      running = [group.create_task(one(t, s)) for t in tasks for s in range(samples)]
    return [task.result() for task in running]

  async def _attempts(
    self, task: Task, sample: int, sampling: Sampling, seed: int, limits: EpisodeLimits
  ) -> Episode:
    for attempt in range(self.config.rollout.attempts):
      try:
        return await run_episode(
          self.make_env(),
          task,
          self.client,
          self.chat,
          limits,
          sampling=sampling,
          key=sampling_key(seed, task.serial, sample, 0),  # no failure may change the result
          sample=sample,
          attempt=attempt,
        )
      except (EnvFailure, EngineFailure, EpisodeStalled) as error:
        if attempt + 1 == self.config.rollout.attempts:
          raise RunFailed(
            f"task {task.id} failed {attempt + 1} times (rollout.attempts), the last with "
            f"{type(error).__name__}: {error}"
          ) from error
        log.warning("attempt %d of task %s failed: %s", attempt + 1, task.id, error)
    raise AssertionError("rollout.attempts is at least 1")


async def _end_other_tasks() -> None:
  """Cancels what still runs in this loop, and waits until it has noticed."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  if others:
    await asyncio.wait(others, timeout=END_SECONDS)
