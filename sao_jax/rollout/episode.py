"""One run of one environment: messages on one side, token ids on the other.

Token-in, token-out: what the policy sampled keeps its ids for ever.  Only new messages are
encoded, and they are appended, so an episode of n turns costs O(n) tokens and the trained ids are
the sampled ones by construction.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import struct
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Literal, TypeVar

import numpy as np

from sao_jax.config import EnvConfig, RolloutConfig
from sao_jax.data.chat import Chat
from sao_jax.envs.base import Env
from sao_jax.envs.pool import Patience
from sao_jax.rollout.client import BadRequest, Client, EngineFailure, Session
from sao_jax.types import Completion, Episode, Sampling, Task, Trajectory

log = logging.getLogger(__name__)
T = TypeVar("T")

CLEANUP_SECONDS = 5.0  # longest wait for one thing to close or to take its cancellation


class EpisodeStalled(Exception):
  """One await of an episode made no progress in time: infrastructure, so retried and counted."""


class TaskRefused(ValueError):
  """A task that no attempt can run, such as one whose prompt exceeds the episode's budget."""


class RewardError(ValueError):
  """A reward that belongs to no action, or that is not a number."""


@dataclasses.dataclass(frozen=True)
class EpisodeLimits:
  """The budget of a whole episode; a continued one never gets a fresh one.

  ``max_tokens`` counts prompt, actions and observations.  ``max_seconds`` is looked at between
  awaits: spending it is truncation, whereas one await longer than ``await_seconds`` is a failure,
  so a hung service can never pass for a model that took too long.  Time in line for a worker that
  episodes share, such as a sandbox's, counts against neither (see ``envs.pool``).
  """

  max_turns: int
  max_tokens: int
  max_turn_tokens: int
  max_seconds: float
  await_seconds: float

  @classmethod
  def from_config(cls, env: EnvConfig, rollout: RolloutConfig) -> "EpisodeLimits":
    return cls(
      env.max_turns, env.max_tokens, env.max_turn_tokens, env.max_seconds, rollout.await_seconds
    )


@dataclasses.dataclass
class Progress:
  """Where an episode is, readable from other threads while it runs."""

  episode_id: str
  task_id: str
  turn: int = 0
  event: str = "created"
  since: float = dataclasses.field(default_factory=time.monotonic)
  started: float = dataclasses.field(default_factory=time.monotonic)
  action_tokens: int = 0
  oldest_version: int | None = None  # of its action tokens

  def mark(self, event: str) -> None:
    self.event, self.since = event, time.monotonic()

  def __str__(self) -> str:
    now = time.monotonic()
    return (
      f"episode {self.episode_id} (task {self.task_id}), turn {self.turn}, last event "
      f"'{self.event}' {now - self.since:.1f} s ago, running for {now - self.started:.1f} s"
    )


def sampling_key(seed: int, serial: int, sample: int, attempt: int) -> tuple[int, int]:
  """The two uint32 words of the PRNG key of one attempt at one episode.

  BLAKE2b over the four numbers as little-endian int64: a pure function on the host, the same on
  every machine and in every version of JAX and NumPy.  All turns share it, because the engine folds
  in the absolute index of each token.
  """
  packed = struct.pack("<4q", seed, serial, sample, attempt)
  digest = hashlib.blake2b(packed, digest_size=8, person=b"sao_jax.sampling").digest()
  high, low = struct.unpack("<2I", digest)
  return high, low


class TrajectoryBuilder:
  """Appends observations and completions; puts each reward on the last action before it."""

  def __init__(self) -> None:
    self._parts: list[Completion | np.ndarray] = []
    self._rewards: list[tuple[int, float]] = []
    self._last_action: int | None = None
    self.size = 0
    self.num_actions = 0

  def observe(self, tokens: list[int]) -> None:
    self._parts.append(np.asarray(tokens, np.int32))
    self.size += len(tokens)

  def act(self, completion: Completion) -> None:
    if self.size == 0:
      raise ValueError("a completion at position 0: nothing could have sampled it")
    self._parts.append(completion)
    self.size += len(completion.tokens)
    self.num_actions += len(completion.tokens)
    self._last_action = self.size - 1

  def reward(self, value: float) -> None:
    if not math.isfinite(value):
      raise RewardError(f"reward {value} is not a finite number")
    if value == 0:
      return
    if self._last_action is None:
      raise RewardError(f"reward {value} came before the first action: it belongs to no token")
    self._rewards.append((self._last_action, value))

  def finish(
    self, *, task_id: str, episode_id: str, group: int, truncated: bool, segment: int = 0
  ) -> Trajectory:
    """The trajectory: versions -1, log-probs 0 and temperatures 1 where nothing was sampled."""
    size = self.size
    tokens, versions = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    mask, logprobs = np.zeros(size, bool), np.zeros(size, np.float32)
    temperature, rewards = np.ones(size, np.float32), np.zeros(size, np.float32)
    start = 0
    for part in self._parts:
      ids = part.tokens if isinstance(part, Completion) else part
      here = slice(start, start + len(ids))
      tokens[here] = ids
      if isinstance(part, Completion):
        mask[here] = True
        logprobs[here] = part.logprobs
        versions[here] = part.policy_version
        temperature[here] = part.temperature
      start = here.stop
    for position, value in self._rewards:
      rewards[position] += value
    return Trajectory(
      task_id=task_id,
      episode_id=episode_id,
      segment=segment,
      group=group,
      tokens=tokens,
      action_mask=mask,
      rollout_logprobs=logprobs,
      policy_version=versions,
      temperature=temperature,
      rewards=rewards,
      truncated=truncated,
    )


async def run_episode(
  env: Env,
  task: Task,
  client: Client,
  chat: Chat,
  limits: EpisodeLimits,
  *,
  sampling: Sampling | None = None,
  key: tuple[int, int] = (0, 0),
  episode_id: str = "",
  sample: int = 0,
  attempt: int = 0,
  group: int | None = None,
  progress: Progress | None = None,
) -> Episode:
  """Runs one environment to its end and closes it.

  A turn may sample min(max_turn_tokens, max_tokens − used) tokens.  The episode is truncated when
  its budget is spent before the environment says ``done``, and also when the last reply was cut by
  its length: the environment gets to grade that reply, and the reward stays as graded.

  Args:
    env: single use.
    task: what to solve.
    client: where to sample.
    chat: messages ↔ tokens.
    limits: the budget.
    sampling: temperature and truncation; its key, stop ids and length are set here.
    key: see ``sampling_key``.
    episode_id: names the episode and its session; default from serial, sample and attempt.
    sample: index of the rollout within its group.
    attempt: how often infrastructure has failed this episode before.
    group: default the task's serial.
    progress: kept up to date for whoever watches.

  Raises:
    EnvFailure, EngineFailure: infrastructure failed.
    EpisodeStalled: an await gave no sign of life for ``limits.await_seconds``.
    TaskRefused: the prompt leaves no room for a reply, or the engine cannot serve it.
    RewardError: the environment gave a reward that cannot be placed.
  """
  name = episode_id or f"{task.serial}.{sample}.{attempt}"
  run = _Run(
    env=env,
    task=task,
    chat=chat,
    limits=limits,
    sampling=dataclasses.replace(sampling or Sampling(1), key=key, stop_ids=tuple(chat.stop_ids)),
    progress=progress or Progress(name, task.id),
  )
  try:
    prompt = await run.reset()
    async with _session(client, name, run) as session:
      status = await run.converse(session, prompt)
  finally:
    await _close(env.close(), f"closing the environment of episode {name}")
  return run.episode(name, sample, attempt, task.serial if group is None else group, status)


@dataclasses.dataclass
class _Run:
  """The state of one episode between its awaits."""

  env: Env
  task: Task
  chat: Chat
  limits: EpisodeLimits
  sampling: Sampling
  progress: Progress
  builder: TrajectoryBuilder = dataclasses.field(default_factory=TrajectoryBuilder)
  started: float = dataclasses.field(default_factory=time.monotonic)
  queued: float = 0.0  # seconds in line for shared workers: no doing of this episode
  reward: float = 0.0
  incarnation: int | None = None
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  seconds: dict[str, float] = dataclasses.field(
    default_factory=lambda: {"sample_seconds": 0.0, "env_seconds": 0.0}
  )

  async def wait(self, event: str, work: Awaitable[T], part: str) -> T:
    self.progress.mark(event)
    began, patience = time.monotonic(), Patience()
    try:
      return await bounded(work, self.limits.await_seconds, self.progress, patience)
    finally:
      self.queued += patience.queued
      self.seconds[part] += time.monotonic() - began

  async def reset(self) -> list[int]:
    messages = await self.wait("reset", self.env.reset(self.task), "env_seconds")
    prompt = self.chat.encode_prompt(messages)
    if not 0 < len(prompt) < self.limits.max_tokens:
      raise TaskRefused(
        f"the prompt of task {self.task.id} has {len(prompt)} tokens; it needs at least 1 and must "
        f"leave room for a reply within env.max_tokens = {self.limits.max_tokens}"
      )
    self.builder.observe(prompt)
    return prompt

  async def converse(self, session: Session, prompt: list[int]) -> Literal["done", "truncated"]:
    limits, new = self.limits, prompt
    for turn in range(limits.max_turns):
      self.progress.turn = turn + 1
      await self.wait("extend", session.extend(new), "sample_seconds")
      completion = await self.sample(session)
      cut = completion.stop == "length"
      reply = self.chat.decode_reply(completion.tokens.tolist())
      step = await self.wait("env step", self.env.step(reply), "env_seconds")
      self.builder.reward(step.reward)
      self.reward += step.reward
      for name, value in step.metrics.items():
        self.metrics[name] = self.metrics.get(name, 0.0) + value
      if step.done:
        return "truncated" if cut else "done"
      new = self.chat.encode_observation(step.messages, closed=not cut)
      room = limits.max_tokens - self.builder.size - len(new)
      if room >= 0:  # kept even when no turn follows: a bootstrapped value has to see it
        self.builder.observe(new)
      spent = time.monotonic() - self.started - self.queued
      if room <= 0 or spent >= limits.max_seconds:
        break
    return "truncated"

  async def sample(self, session: Session) -> Completion:
    cap = min(self.limits.max_turn_tokens, self.limits.max_tokens - self.builder.size)
    sampling = dataclasses.replace(self.sampling, max_new_tokens=cap)
    try:
      completion = await self.wait("sample", session.sample(sampling), "sample_seconds")
    except BadRequest as error:
      raise TaskRefused(f"the engine cannot serve task {self.task.id}: {error}") from error
    count = len(completion.tokens)
    sizes = {count, len(completion.logprobs), len(completion.policy_version)}
    if not 0 < count <= cap or len(sizes) > 1 or not np.isfinite(completion.logprobs).all():
      raise EngineFailure(
        f"a completion of {count} tokens (allowed: 1 to {cap}), {len(completion.logprobs)} "
        f"log-probs and {len(completion.policy_version)} versions; lengths must agree and "
        "log-probs be finite"
      )
    if self.incarnation not in (None, completion.incarnation):
      raise EngineFailure(
        f"one session sampled in incarnation {self.incarnation} and {completion.incarnation}"
      )
    self.incarnation = completion.incarnation
    self.builder.act(completion)
    oldest = int(completion.policy_version.min())
    seen = self.progress.oldest_version
    self.progress.oldest_version = oldest if seen is None else min(seen, oldest)
    self.progress.action_tokens = self.builder.num_actions
    return completion

  def episode(
    self, name: str, sample: int, attempt: int, group: int, status: Literal["done", "truncated"]
  ) -> Episode:
    trajectory = self.builder.finish(
      task_id=self.task.id, episode_id=name, group=group, truncated=status == "truncated"
    )
    counts = {"turns": float(self.progress.turn), "tokens": float(self.builder.size)}
    self.progress.mark("finished")
    return Episode(
      episode_id=name,
      task_serial=self.task.serial,
      sample=sample,
      attempt=attempt,
      group=group,
      trajectories=(trajectory,),
      status=status,
      reward=self.reward,
      incarnation=self.incarnation or 0,
      started=self.started,
      finished=time.monotonic(),
      metrics={**self.metrics, **counts, **self.seconds},
    )


async def bounded(
  work: Awaitable[T], seconds: float, progress: object, patience: Patience | None = None
) -> T:
  """Awaits ``work``, for so long after the last sign of life that ``patience`` heard of.

  It is given up even if it ignores its cancellation.  Raises EpisodeStalled naming ``progress``.
  """
  patience = patience or Patience()
  with patience.watching():
    task = asyncio.ensure_future(work)
  task.add_done_callback(_retrieve)
  done: set[asyncio.Future[T]] = set()
  try:
    while not done and (left := patience.last() + seconds - time.monotonic()) > 0:
      done, _ = await asyncio.wait({task}, timeout=left)
  except asyncio.CancelledError:
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_SECONDS)
    raise
  if not done:
    task.cancel()
    await asyncio.wait({task}, timeout=CLEANUP_SECONDS)
    raise EpisodeStalled(f"no progress within {seconds:g} s: {progress}")
  if task.cancelled():  # not by us: the other side gave up
    raise EngineFailure(f"cancelled by the other side: {progress}")
  return task.result()


def _retrieve(task: asyncio.Task) -> None:
  """Marks a given-up task's exception as seen, else asyncio logs it when the task is collected."""
  if not task.cancelled():
    task.exception()


async def _close(work: Awaitable[object], what: str) -> None:
  """Closing must neither hang nor undo a finished episode: what goes wrong is logged."""
  try:
    await bounded(work, CLEANUP_SECONDS, what)
  except Exception:
    log.warning("%s failed", what, exc_info=True)


@contextlib.asynccontextmanager
async def _session(client: Client, key: str, run: _Run) -> AsyncIterator[Session]:
  manager, opened = client.session(key), []

  async def enter() -> None:
    opened.append(await manager.__aenter__())

  try:  # a cancellation may come when the session is open and nobody has it yet
    await run.wait("open session", enter(), "sample_seconds")
    yield opened[0]
  finally:
    if opened:
      await _close(manager.__aexit__(None, None, None), f"closing the session of episode {key}")
