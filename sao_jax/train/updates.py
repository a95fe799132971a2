"""The updates of one loop step: estimates, K critic updates, policy updates over minibatches."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sao_jax.config import Config
from sao_jax.data.packing import BatchSpec
from sao_jax.optim import learning_rate
from sao_jax.outcome import RunFailed
from sao_jax.sharding import make_mesh, place_batch, settle
from sao_jax.train.anchor import Anchor
from sao_jax.train.estimates import make_estimate, value_tokens
from sao_jax.train.identity import run_identity
from sao_jax.train.progress import phase
from sao_jax.train.record import TokenRecord
from sao_jax.train.state import Policy, describe, make_state
from sao_jax.train.steps import TOKEN_LOGPROBS, make_critic_step, make_policy_step
from sao_jax.types import Batch, Estimates, ModelState


class TooManyBadSteps(RunFailed):
  """Loss or gradient was not finite for ``max_bad_steps`` steps in a row."""


def minibatches(
  batch: Batch, estimates: Estimates, parts: int
) -> Iterator[tuple[Batch, Estimates]]:
  """Yields (batch, estimates) of rows i mod parts; per-trajectory arrays go along whole."""
  if parts == 1:
    yield batch, estimates
    return
  total = len(batch.tokens)

  def per_row(x, i):
    return x[i::parts] if x.ndim == 2 and len(x) == total else x

  for i in range(parts):
    yield jax.tree.map(lambda x, i=i: per_row(x, i), (batch, estimates))


def interleaved(parts: list[jax.Array]) -> jax.Array:
  """The inverse of ``minibatches``: row i of part p is row i · parts + p."""
  if len(parts) == 1:
    return parts[0]
  stacked = jnp.stack(parts, axis=1)
  return stacked.reshape(-1, *stacked.shape[2:])


def joined(updates: list[dict]) -> dict:
  """Metrics of several updates as one: the largest of what must not hide, the last of the rest."""
  worst = ("nonfinite", "skipped", "max_gap", "max_gap_fresh")
  return {
    name: jnp.stack([update[name] for update in updates]).max()
    if name.split("/")[-1] in worst
    else value
    for name, value in updates[-1].items()
  }


class LoopSteps:
  """The updates of one loop step, with the states that they donate and replace."""

  def __init__(
    self,
    config: Config,
    policy: Policy,
    critic_def: nnx.GraphDef | None,
    critic_params: Any,
    report: Callable[[str], None] = print,
  ) -> None:
    self.config = config
    self.identity = run_identity(config)
    self.mesh = make_mesh(config.mesh)
    self.tokens = TokenRecord(None, None, None)  # of the last update
    self._verdict: dict[str, jax.Array] = {}
    self.compiled: set[tuple[int, ...]] = set()
    trained = config.num_steps - (config.critic.only_steps if critic_def is not None else 0)
    self.policy_rate = learning_rate(config.policy, trained, config.policy.minibatches)
    self.policy, policy_tx = make_state(
      policy.params,
      config.policy,
      trained,
      updates_per_step=config.policy.minibatches,
      mesh=self.mesh,
    )
    report(f"policy learning rate: {float(self.policy_rate(0)):.2e} at its first update")
    report(describe("policy", self.policy, policy_tx))
    self.policy_step = make_policy_step(config, policy.graphdef, policy_tx)
    self.anchor = Anchor(config.loss, policy.graphdef, self.policy.params)
    self.estimate = make_estimate(config, critic_def)
    self.critic: ModelState | None = None
    self.critic_step: Callable | None = None
    self.bad_steps = self.judged = 0
    if critic_def is not None:
      self.critic, critic_tx = make_state(
        critic_params,
        config.critic,
        config.num_steps,
        config.critic.trainable,
        config.critic.updates_per_step,
        mesh=self.mesh,
      )
      report(describe("critic", self.critic, critic_tx))
      self.critic_step = make_critic_step(critic_def, critic_tx, config.critic.micro_batches)

  def states(self) -> dict[str, Any]:
    """What is saved and restored."""
    trees = {"policy": self.policy, "critic": self.critic, "anchor": self.anchor.params}
    return {name: tree for name, tree in trees.items() if tree is not None}

  def restore(self, trees: dict[str, Any]) -> None:
    self.policy, self.critic = trees["policy"], trees.get("critic")
    self.anchor.params = trees.get("anchor")

  def __call__(self, batch: Batch, version: int) -> dict:
    if (shape := batch.tokens.shape) not in self.compiled:
      self.compiled.add(shape)
      with phase(f"compiling the training step for {shape[0]} rows of {shape[1]} tokens"):
        return jax.block_until_ready(self.update(batch, version))
    return settle(self.mesh, self.update(batch, version))

  def warm_up(self) -> None:
    """Compiles for the longest rows before episodes start to age; padding trains nothing."""
    spec, kept = BatchSpec.from_config(self.config), self.anchor.params
    self(spec.zeros(spec.lengths[-1]), self.config.critic.only_steps)
    self.anchor.params = kept  # this was no step: an average must not move twice after a restart

  def update(self, batch: Batch, version: int) -> dict:
    batch = place_batch(self.mesh, batch)
    critic_config = self.config.critic
    estimates, metrics = self.estimate(self.critic and self.critic.params, batch)
    if self.critic is not None and self.critic_step is not None:
      updates, valued = [], value_tokens(self.config.advantage, batch)
      for _ in range(critic_config.updates_per_step):
        self.critic, update = self.critic_step(self.critic, valued, estimates.returns)
        updates.append(update)
      metrics |= joined(updates)
      if critic_config.advantages == "after":
        estimates, _ = self.estimate(self.critic.params, batch)
    logprobs = None
    estimates, timed = self.anchor(self.policy.params, batch, estimates, after=self.critic)
    metrics |= timed
    if self.critic is None or version >= critic_config.only_steps:
      parts, updates = self.config.policy.minibatches, []
      for part, part_estimates in minibatches(batch, estimates, parts):
        self.policy, update = self.policy_step(self.policy, part, part_estimates)
        updates.append(update)
      logprobs = interleaved([update.pop(TOKEN_LOGPROBS) for update in updates])
      metrics |= joined(updates)
    self.anchor.follow(self.policy.params, version + 1)
    self.tokens = TokenRecord(estimates.values, estimates.advantages, logprobs)
    self._verdict = {name: x for name, x in metrics.items() if name.endswith("/nonfinite")}
    return metrics

  @property
  def verdict(self) -> dict[str, float]:
    """Which losses or gradients of the last update were not finite; waits for it."""
    return {name: float(x) for name, x in self._verdict.items()}

  def raise_if_stuck(self, metrics: dict, limit: int) -> None:
    """``metrics`` of the last step that was read: reading never waits for the step under way."""
    step = metrics.get("step", 0)
    if step <= self.judged:
      return
    self.judged = step
    bad = metrics.get("policy/nonfinite", 0) or metrics.get("critic/nonfinite", 0)
    self.bad_steps = self.bad_steps + 1 if bad else 0
    if self.bad_steps >= limit:
      raise TooManyBadSteps(
        f"loss or gradient was not finite in steps {step - limit + 1} to {step}; the weights "
        f"were left as they were before. Lower policy.lr = {self.config.policy.lr} or critic.lr = "
        f"{self.config.critic.lr}, or look at the rewards of those steps in metrics.jsonl."
      )
