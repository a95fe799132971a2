"""Value pretraining: the critic regresses Monte-Carlo returns (λ = 1) of trajectories that are there.

Of our own policy's rollouts, or of a file of labelled solutions.  What it explains is measured on
trajectories that are never trained on.
"""

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from sao_jax.config import Config
from sao_jax.data.archive import episodes_from_bytes, episodes_to_bytes
from sao_jax.data.packing import BatchSpec, pack
from sao_jax.data.solutions import solution_episodes
from sao_jax.data.tasks import fingerprint, make_source, task_stream
from sao_jax.outcome import RunFailed
from sao_jax.rollout.service import RolloutService
from sao_jax.sharding import make_mesh, place_batch, settle
from sao_jax.train.estimates import make_estimate, value_tokens
from sao_jax.train.identity import value_identity
from sao_jax.train.jsonlines import write_whole
from sao_jax.train.preemption import Preemption
from sao_jax.train.progress import phase
from sao_jax.train.stage import Stage, refuse_changes, run_stage
from sao_jax.train.state import Policy, describe, make_state
from sao_jax.train.steps import make_critic_step
from sao_jax.types import Batch, Episode, ModelState, Version

HELD_OUT = 8  # one rollout of so many is never trained on


class GateNotMet(RunFailed):
  """The pretrained critic explains too little for RL to start."""


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Trajectories to train on and others to test on."""

  training: list[Episode]
  held_out: list[Episode]
  source: str
  fingerprint: str


def read_corpus(config: Config, policy: Policy, report: Callable[[str], None]) -> Corpus:
  """The labelled solutions of ``value_pretrain.path``."""
  stage = config.value_pretrain
  training, held_out, digest = solution_episodes(
    stage.path, policy.chat, config.task, config.env.max_tokens, stage.max_solutions, config.seed,
    report,
  )  # fmt: skip
  return Corpus(training, held_out, stage.path, digest)


def roll_out_corpus(
  config: Config, service: RolloutService, folder: Path, report: Callable[[str], None]
) -> Corpus:
  """``value_pretrain.rollouts`` episodes of the service's policy, kept in the stage's folder."""
  path, identity = folder / "rollouts.npz", _corpus_identity(config)
  label = path.with_suffix(".json")
  episodes = kept_rollouts(path, label, identity, report)
  if episodes is None:
    stream = task_stream(make_source(config.task, "train"), config.seed + 1)
    tasks = [stream[i] for i in range(config.value_pretrain.rollouts)]
    with phase(f"rolling out {len(tasks)} episodes for the critic"):
      episodes = service.run(tasks, temperature=config.rollout.temperature, seed=config.seed + 2)
    # The incarnation is that of the start that sampled them; to the critic they are all version 0.
    episodes = [dataclasses.replace(e, incarnation=0) for e in episodes]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, episodes_to_bytes(episodes))
    write_whole(label, json.dumps(identity))
  size = max(len(episodes) // HELD_OUT, 1)
  return Corpus(episodes[:-size], episodes[-size:], "rollouts", identity["data"])


def kept_rollouts(
  path: Path, label: Path, identity: dict[str, Any], report: Callable[[str], None]
) -> list[Episode] | None:
  """The rollouts of an earlier start; None where there are none, or damaged ones."""
  if not (path.exists() and label.exists()):
    return None
  try:
    saved = json.loads(label.read_text())
    episodes = episodes_from_bytes(path.read_bytes())
  except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    report(f"value pretraining: {path} is damaged ({error}): rolling out again")
    return None
  refuse_changes(path.parent, saved, identity)
  report(f"value pretraining: {len(episodes)} rollouts taken from {path}")
  return episodes


def _corpus_identity(config: Config) -> dict[str, Any]:
  identity = value_identity(config, fingerprint(config.task))
  kept = ("value_pretrain.rollouts",)
  return {
    name: value
    for name, value in identity.items()
    if not name.startswith("value_pretrain.") or name in kept
  }


def pretrain_value(
  config: Config,
  critic_def: nnx.GraphDef,
  params: Any,
  corpus: Corpus,
  stop: Preemption,
  report: Callable[[str], None] = print,
) -> Any:
  """Trains the critic, or takes what an earlier run of the stage left; returns its parameters.

  Writes ``value/result.json`` with the explained variance on the held-out trajectories.
  """
  stage_config, folder = config.value_pretrain, config.folder / "value"
  fit = _Fit(config, critic_def, params, corpus)
  identity = value_identity(config, corpus.fingerprint)
  stage = Stage("critic", "value pretraining", folder, fit.total, identity)
  report(describe("value pretraining", fit.fresh, fit.optimizer))
  state = run_stage(stage, config, fit.fresh, fit.update, stop, report)
  result = {
    "corpus": len(corpus.training),
    "held_out": len(corpus.held_out),
    "explained_variance": fit.explained_variance(state.params),
    "source": corpus.source,
    "epochs": stage_config.epochs,
  }
  write_whole(folder / "result.json", json.dumps(result, indent=2))
  report(
    f"value pretraining: {result['corpus']} trajectories, explained variance "
    f"{result['explained_variance']:.3f} on {result['held_out']} held out"
  )
  return state.params


class _Fit:
  """The updates of value pretraining on one corpus."""

  def __init__(self, config: Config, critic_def: nnx.GraphDef, params: Any, corpus: Corpus) -> None:
    stage = config.value_pretrain
    self.config, self.corpus, self.size = config, corpus, stage.batch_size
    self.per_epoch = max(len(corpus.training) // self.size, 1)
    self.total = stage.epochs * self.per_epoch
    self.mesh = make_mesh(config.mesh)
    self.fresh, self.optimizer = make_state(
      params, stage, self.total, stage.trainable, mesh=self.mesh
    )
    self._spec = BatchSpec.from_config(config, batch_size=self.size)
    self._step = make_critic_step(critic_def, self.optimizer, config.critic.micro_batches)
    # Monte-Carlo returns, whatever the critic's λ in RL: nothing can be bootstrapped from yet.
    critic = dataclasses.replace(config.critic, lambda_=1.0)
    self._estimate = make_estimate(dataclasses.replace(config, critic=critic), critic_def)

  def update(self, state: ModelState, index: int) -> tuple[ModelState, dict[str, Any]]:
    """Batch ``index`` of all epochs; the order of an epoch depends on the seed and its number."""
    epoch, turn = divmod(index, self.per_epoch)
    order = np.random.default_rng([self.config.seed, epoch]).permutation(len(self.corpus.training))
    mine = order[turn * self.size : (turn + 1) * self.size]
    batch = self._packed([self.corpus.training[i] for i in mine])
    targets, _ = self._estimate(state.params, batch)
    valued = value_tokens(self.config.advantage, batch)
    state, metrics = self._step(state, valued, targets.returns)
    settle(self.mesh, metrics)
    if turn + 1 == self.per_epoch:
      metrics["value/held_out_explained_variance"] = self.explained_variance(state.params)
    return state, metrics

  def explained_variance(self, params: Any) -> float:
    """Over all held-out action tokens, in one piece."""
    values, returns = [], []
    for start in range(0, len(self.corpus.held_out), self.size):
      batch = self._packed(self.corpus.held_out[start : start + self.size])
      estimates, _ = self._estimate(params, batch)
      mask = np.asarray(batch.value_mask)
      values.append(np.asarray(estimates.values, np.float64)[mask])
      returns.append(np.asarray(estimates.returns, np.float64)[mask])
    return explained(np.concatenate(values), np.concatenate(returns))

  def _packed(self, episodes: list[Episode]) -> Batch:
    batch, _ = pack(episodes, Version(0, 0), self.config, spec=self._spec)
    return place_batch(self.mesh, batch)


def explained(values: np.ndarray, returns: np.ndarray) -> float:
  """1 − Var(returns − values) / Var(returns); 0 where the returns do not vary."""
  largest = max(np.abs(values).max(initial=0.0), np.abs(returns).max(initial=0.0))
  if returns.std() <= 1e-6 * largest:  # rounding of advantages + values, as in kernels.stats
    return 0.0
  return 1.0 - float((returns - values).var() / returns.var())


def check_gate(config: Config) -> None:
  """Raises GateNotMet if value pretraining ended below ``critic.min_explained_variance``."""
  asked = config.critic.min_explained_variance
  if asked == -np.inf:
    return
  result = json.loads((config.folder / "value" / "result.json").read_text())
  if (found := result["explained_variance"]) < asked:
    raise GateNotMet(
      f"RL was not started: after value pretraining on {result['corpus']} trajectories the critic "
      f"explains {found:.3f} of the held-out variance, and critic.min_explained_variance = {asked} asks "
      "for more. Give it more (value_pretrain.rollouts, max_solutions or epochs), another "
      "value_pretrain.lr, or lower the gate."
    )
