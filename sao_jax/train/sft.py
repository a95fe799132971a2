"""Supervised start: next-token loss on the assistant turns of traces, packed like any episode."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sao_jax.config import Config
from sao_jax.data.chat import Chat
from sao_jax.data.conversations import ConversationBatches, supervised_episode
from sao_jax.data.packing import BatchSpec, pack
from sao_jax.data.tasks import fingerprint, make_source
from sao_jax.data.traces import Traces, encode_trace
from sao_jax.envs.expression import ExpressionError, evaluate
from sao_jax.envs.math_tool import shown
from sao_jax.sharding import make_mesh, place_batch, settle
from sao_jax.train.identity import sft_identity
from sao_jax.train.preemption import Preemption
from sao_jax.train.stage import Stage, refusals, run_stage
from sao_jax.train.state import Policy, describe, make_state
from sao_jax.train.steps import make_sft_step
from sao_jax.types import Episode, ModelState, Version

SUPERVISED = Version(0, 0)  # what text that nobody sampled counts as


def tool_output(config: Config) -> Callable[[str], str]:
  """What the environment's tool would show the model for a generated expression."""

  def run(code: str) -> str:
    try:
      text = str(evaluate(code))
    except ExpressionError as error:
      text = str(error)
    return shown(text, config.env.max_observation)

  return run


class GeneratedBatches:
  """``batches[step]``: the next ``sft.batch_size`` generated traces."""

  def __init__(self, config: Config, chat: Chat) -> None:
    source = make_source(config.task, "train")
    self._traces = Traces(source, tool_output(config), config.sft.good_fraction, config.seed)
    self._size, self._chat = config.sft.batch_size, chat
    self.fingerprint = fingerprint(config.task)

  def __getitem__(self, step: int) -> list[Episode]:
    return [
      supervised_episode(*encode_trace(self._traces[i], self._chat), i, name=f"trace-{i}")
      for i in range(step * self._size, (step + 1) * self._size)
    ]


def sft(
  config: Config, policy: Policy, stop: Preemption, report: Callable[[str], None] = print
) -> Policy:
  """Trains the policy, or takes what an earlier run of the stage left; returns it trained."""
  stage_config = config.sft
  spec = BatchSpec.from_config(config, batch_size=stage_config.batch_size)
  if stage_config.path:
    # Short conversations share rows: room for as many as could.
    spec = dataclasses.replace(spec, segments=spec.rows * max(1, spec.lengths[-1] // 16))
  with refusals():
    batches = make_batches(config, policy.chat, spec, report)
  total = stage_config.steps
  if isinstance(batches, ConversationBatches) and not total:
    total = batches.total_steps(stage_config.epochs)
  mesh = make_mesh(config.mesh)
  state, optimizer = make_state(policy.params, stage_config, total, mesh=mesh)
  report(describe("sft policy", state, optimizer))
  step = make_sft_step(policy.graphdef, optimizer, stage_config.aux_weight)

  def update(state: ModelState, index: int) -> tuple[ModelState, dict[str, Any]]:
    batch, packed = pack(batches[index], SUPERVISED, config, spec=spec)
    state, metrics = step(state, place_batch(mesh, batch))
    return state, settle(mesh, metrics) | {"batch/fill": packed["batch/fill"]}

  identity = sft_identity(config, batches.fingerprint)
  stage = Stage("sft", "sft", config.folder / "sft", total, identity)
  state = run_stage(stage, config, state, update, stop, report)
  return dataclasses.replace(policy, params=state.params)


def make_batches(
  config: Config, chat: Chat, spec: BatchSpec, report: Callable[[str], None]
) -> GeneratedBatches | ConversationBatches:
  """The conversations of ``sft.path``, or generated traces."""
  if config.sft.path:
    return ConversationBatches(config.sft.path, chat, spec, config.seed, report)
  return GeneratedBatches(config, chat)
