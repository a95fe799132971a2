"""The loop: single-rollout asynchronous SAO (arXiv 2607.07508).

Task → run_episode → Episode → queue → pack → Batch → estimate → Estimates → steps
     → WeightStore.publish(params, version + 1) → engine, between two decode steps
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.config import Config
from sao_jax.data.archive import episodes_from_bytes
from sao_jax.data.chat import Chat
from sao_jax.data.packing import pack
from sao_jax.data.tasks import make_source, task_stream
from sao_jax.outcome import Preempted
from sao_jax.rollout.queue import TrajectoryQueue
from sao_jax.rollout.service import RolloutService, Stopped
from sao_jax.rollout.workers import Workers
from sao_jax.train.baselines import RunningMeans
from sao_jax.train.checkpoint import Checkpoints, Saved
from sao_jax.train.keep import Keeper
from sao_jax.train.metrics import Writer
from sao_jax.train.preemption import Preemption
from sao_jax.train.record import Recorder
from sao_jax.train.updates import LoopSteps
from sao_jax.types import Batch, ModelState


def train_sao(
  config: Config,
  steps: LoopSteps,
  chat: Chat,
  service: RolloutService,
  writer: Writer,
  *,
  checkpoints: Checkpoints | None = None,
  resume: Saved | None = None,
  stop: Preemption | None = None,
  evaluate: Callable[[int], dict[str, float]] | None = None,
) -> tuple[ModelState, ModelState | None]:
  """Trains until ``config.num_steps`` batches are consumed; returns policy's and critic's state.

  Each step: K critic updates, one policy update per minibatch with advantages of the critic before
  (or after) them, then the new weights go to the running engine.

  Args:
    config: the run's.
    steps: the states, fresh or restored from ``resume``.
    service: serves the weights of ``steps`` under their version.
    chat, writer: the model's and the run's.
    checkpoints: where to save; None saves nothing.
    resume: the checkpoint to go on from.
    stop: asked between steps, and while waiting for episodes.
    evaluate: metrics of a version, every ``evaluate.every`` steps, while the trainer waits.

  Raises:
    Preempted: the run was asked to stop; the last step is saved.
    TooManyBadSteps: see there.
  """
  stop = stop or Preemption()
  steps.warm_up()
  queue = make_queue(config, service, resume)
  stream = task_stream(make_source(config.task, "train"), config.seed)
  baselines = RunningMeans(config.advantage, resume and resume.meta["baselines"])
  version = service.version().step
  with (
    Recorder(writer, config.report, chat, resume and resume.step) as record,
    Workers(
      config, service.client, stream, service.make_env, chat, queue, service.version,
      resume=resume and resume.meta["workers"],
    ) as workers,
    writer.progress("sao", config.num_steps) as progress,
  ):  # fmt: skip
    keep = Keeper(steps, service, queue, workers, baselines, writer, record, checkpoints)
    if resume is not None and "eval/sampled" not in writer.last:  # a stop had cut it short
      evaluate_if_due(config, keep, version, evaluate, stop)
    while version < config.num_steps and not stop.requested.is_set():
      episodes = queue.get(
        config.batch_size, service.version(), on_wait=progress.waiting, stop=stop.requested
      )
      if not episodes:
        break
      keep.clock.mark("wait")
      batch, packed = pack(episodes, service.version(), config)
      metrics = steps(baselines(batch, episodes), version) | lag_metrics(batch)
      version += 1
      service.publish(steps.policy.params, version)
      queue.release()
      keep.clock.mark("train")
      keep.step(version, episodes, batch, metrics | packed)
      progress.update(version, writer.last)
      steps.raise_if_stuck(writer.last, config.max_bad_steps)
      evaluate_if_due(config, keep, version, evaluate, stop)
      keep.end_step(version)
    keep.finish(version, config.max_bad_steps)
  if stop.requested.is_set():
    raise Preempted(f"step {version} of {config.num_steps}")
  return steps.policy, steps.critic


def make_queue(config: Config, service: RolloutService, resume: Saved | None) -> TrajectoryQueue:
  """The queue, with the episodes that waited in it when it was saved."""
  rollout = config.rollout
  queue = TrajectoryQueue(
    config.batch_size,
    rollout.max_staleness,
    rollout.stale,
    config.group_size,
    rollout.min_staleness,
  )
  if resume is not None:
    waiting = episodes_from_bytes(resume.blob)
    queue.restore(waiting, resume.meta["accounting"], service.version().incarnation)
  return queue


def evaluate_if_due(
  config: Config,
  keep: Keeper,
  step: int,
  evaluate: Callable[[int], dict[str, float]] | None,
  stop: Preemption,
) -> None:
  """Every ``evaluate.every`` steps but the last, which has an evaluation of its own.

  A stop cuts it short; its step is saved all the same, and evaluated after the restart.
  """
  every = config.evaluate.every
  due = every > 0 and 0 < step < config.num_steps and step % every == 0
  if evaluate is not None and due and not stop.requested.is_set():
    with contextlib.suppress(Preempted, Stopped):
      keep.evaluate(step, evaluate)


def lag_metrics(batch: Batch) -> dict[str, Any]:
  """Trained tokens by staleness, and the share of trajectories that saw new weights on their way."""
  actions = batch.action_mask
  trained = batch.staleness[batch.loss_mask]
  counts = np.bincount(trained) if len(trained) else np.zeros(1, int)
  pairs = np.unique(np.stack([batch.segment_ids[actions], batch.staleness[actions]]), axis=1)
  versions = np.bincount(pairs[0])[1:] if pairs.size else np.zeros(1, int)
  mixed, present = int((versions > 1).sum()), int((versions > 0).sum())
  return {
    "staleness/histogram": counts.tolist(),
    "staleness/mixed_versions": mixed / max(present, 1),
  }
