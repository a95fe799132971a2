"""The proximal policy π_prox that a loss takes its ratio against, where a forward is needed for it."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sao_jax.config import LossConfig
from sao_jax.train.steps import make_logprobs
from sao_jax.types import Batch, Estimates


class Anchor:
  """Log-probs of a batch under π_prox, by ``loss.prox``; nothing for ``rollout`` and ``reuse``.

  ``recompute`` is the policy at the start of the step.  ``ewma`` and ``snapshot`` keep weights of
  their own (``params``): an exponential average after every step, or a copy every ``prox_every``.

  Args:
    config: the loss.
    policy_def: graph of the policy.
    params: of the policy, to start from; copied where weights are kept.
  """

  def __init__(self, config: LossConfig, policy_def: nnx.GraphDef, params: Any) -> None:
    self._config = config
    self._kept = config.prox in ("ewma", "snapshot")
    self.params = _copy(params) if self._kept else None
    needed = self._kept or config.prox == "recompute"
    self._logprobs = make_logprobs(policy_def) if needed else None

  def __call__(
    self, policy: Any, batch: Batch, estimates: Estimates, after: Any = None
  ) -> tuple[Estimates, dict]:
    """The estimates with their anchor, and the seconds that its forward took.

    ``after``: arrays of what was dispatched before; it is waited for, and no part of the time.
    """
    if self._logprobs is None:
      return estimates, {}
    jax.block_until_ready((estimates, after))
    start = time.perf_counter()
    weights = self.params if self._kept else policy
    logprobs = jax.block_until_ready(self._logprobs(weights, batch))
    seconds = time.perf_counter() - start
    return dataclasses.replace(estimates, anchor_logprobs=logprobs), {"time/prox": seconds}

  def follow(self, policy: Any, version: int) -> None:
    """The policy was updated to ``version``."""
    if self._config.prox == "ewma":
      self.params = _averaged(self.params, policy, jnp.float32(self._config.prox_decay))
    elif self._config.prox == "snapshot" and version % self._config.prox_every == 0:
      self.params = _copy(policy)


def _copy(params: Any) -> Any:
  return jax.tree.map(jnp.copy, params)  # the policy's own buffers are donated by its next update


@jax.jit
def _averaged(average: Any, params: Any, decay: jax.Array) -> Any:
  """decay · average + (1 − decay) · params, in the parameters' dtype."""
  return jax.tree.map(
    lambda a, p: (decay * a.astype(jnp.float32) + (1 - decay) * p.astype(jnp.float32)).astype(
      p.dtype
    ),
    average,
    params,
  )
