"""Running means of earlier returns: the baseline that needs neither critic nor group."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from sao_jax.config import AdvantageConfig
from sao_jax.kernels.advantages import running_mean_baseline
from sao_jax.types import Batch, Episode


class RunningMeans:
  """The last ``window`` returns of each prompt and of the run, from earlier batches only.

  With ``window_per = "prompt"`` a prompt that was never seen falls back to the run's mean; with
  ``"run"`` that is everybody's baseline.  Nothing seen yet: an advantage of 0.

  Args:
    config: reads ``window`` and ``window_per``.
    saved: what ``state`` gave, to go on from.
  """

  def __init__(self, config: AdvantageConfig, saved: Mapping[str, Any] | None = None) -> None:
    self._window, self._per_prompt = config.window, config.window_per == "prompt"
    saved = saved or {"run": [], "prompts": {}}
    self._run: collections.deque[float] = collections.deque(saved["run"], maxlen=config.window)
    self._prompts = {
      prompt: collections.deque(returns, maxlen=config.window)
      for prompt, returns in saved["prompts"].items()
    }

  def state(self) -> dict[str, Any]:
    """Plain lists, for a checkpoint."""
    prompts = {prompt: list(returns) for prompt, returns in self._prompts.items()}
    return {"run": list(self._run), "prompts": prompts}

  def __call__(self, batch: Batch, episodes: Sequence[Episode]) -> Batch:
    """The batch with its baselines; its own returns are remembered after that.

    The return of an episode is the mean over its trajectories, as trained.
    """
    ordered = sorted(episodes, key=lambda e: e.sort_key)  # as they were packed
    index = np.asarray(batch.episode)
    used = index >= 0
    totals = np.bincount(index[used], np.asarray(batch.returns)[used], len(ordered))
    returns = totals / np.maximum(np.bincount(index[used], minlength=len(ordered)), 1)
    prompts = [e.trajectories[0].task_id for e in ordered]
    baselines = self._baselines(returns, prompts)
    self._remember(returns, prompts)
    filled: Any = np.where(used, baselines[np.maximum(index, 0)], 0.0).astype(np.float32)
    return dataclasses.replace(batch, baseline=filled)

  def _baselines(self, returns: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    own = [self._prompts.get(prompt, ()) if self._per_prompt else () for prompt in prompts]
    baseline = running_mean_baseline(
      jnp.asarray(returns, jnp.float32),
      jnp.stack([self._padded(earlier) for earlier in own]),
      jnp.array([len(earlier) for earlier in own], jnp.int32),
      jnp.asarray(self._padded(self._run)),
      jnp.int32(len(self._run)),
    )
    return np.asarray(baseline)

  def _padded(self, returns: Sequence[float]) -> np.ndarray:
    window = np.zeros(self._window, np.float32)
    window[: len(returns)] = list(returns)
    return window

  def _remember(self, returns: np.ndarray, prompts: Sequence[str]) -> None:
    for value, prompt in zip(returns.tolist(), prompts, strict=True):
      self._run.append(value)
      if self._per_prompt:
        earlier = self._prompts.setdefault(prompt, collections.deque(maxlen=self._window))
        earlier.append(value)
