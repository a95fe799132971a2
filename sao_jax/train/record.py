"""What a run writes down beside its metrics: every trained episode, some of them token by token,
and when trainer and engine were busy."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sao_jax.config import ReportConfig
from sao_jax.data.chat import Chat
from sao_jax.train.jsonlines import JsonLines
from sao_jax.train.metrics import Writer
from sao_jax.types import Batch, Episode, Trajectory

DIGITS = 4  # significant ones: enough to look at


class TokenRecord(NamedTuple):
  """What the trainer thought of the tokens of a batch, "B T" each; log-probs before the update."""

  values: Any
  advantages: Any
  logprobs: Any | None  # None while the critic warms up alone


class Recorder:
  """Writes ``episodes.jsonl``, ``trajectories.jsonl`` and ``timeline.jsonl``; a context manager.

  Args:
    writer: of the run's metrics: the files lie beside them and share their clock.
    config: how many trajectories to store, and how often.
    chat: turns ids into text.
    resume_step: rows of later steps are taken back; None starts over.
  """

  def __init__(
    self, writer: Writer, config: ReportConfig, chat: Chat, resume_step: int | None
  ) -> None:
    self._config, self._chat = config, chat
    self._started = time.monotonic() - writer.elapsed()
    folder = writer.run_dir
    self._episodes = JsonLines(folder / "episodes.jsonl", resume_step)
    self._trajectories = JsonLines(folder / "trajectories.jsonl", resume_step)
    self._timeline = JsonLines(folder / "timeline.jsonl", resume_step)
    self._spans: list[tuple[str, float, float]] = []

  def __enter__(self) -> "Recorder":
    return self

  def __exit__(self, *exception: object) -> None:
    for file in (self._episodes, self._trajectories, self._timeline):
      file.close()

  def sync(self) -> None:
    """On return, what was written survives a power cut."""
    for file in (self._episodes, self._trajectories, self._timeline):
      file.sync()

  def span(self, what: str, began: float) -> float:
    """The trainer did ``what`` from ``began`` until now; returns now (``time.monotonic``)."""
    now = time.monotonic()
    self._spans.append((what, began, now))
    return now

  def step(self, step: int, engine: Sequence[Sequence[float]]) -> None:
    """Writes the spans of the step, and those of the engine."""

    def at(moment: float) -> float:
      return round(moment - self._started, 3)

    self._timeline.write(
      {
        "step": step,
        "trainer": [[what, at(a), at(b)] for what, a, b in self._spans],
        "engine": [[at(a), at(b)] for a, b in engine],
      }
    )
    self._spans.clear()

  def episodes(self, step: int, episodes: Sequence[Episode]) -> None:
    for episode in episodes:
      versions = np.concatenate([t.policy_version[t.action_mask] for t in episode.trajectories])
      self._episodes.write(
        {
          "step": step,
          "id": episode.trajectories[0].task_id,
          "serial": episode.task_serial,
          "sample": episode.sample,
          "attempt": episode.attempt,
          "reward": episode.reward,
          "actions": episode.num_actions,
          "tokens": sum(len(t.tokens) for t in episode.trajectories),
          "turns": episode.metrics.get("turns"),
          "status": episode.status,
          "version_min": int(versions.min()),
          "version_max": int(versions.max()),
        }
      )

  def wants_trajectories(self, step: int) -> bool:
    every = self._config.trajectories_every
    return every > 0 and (step == 1 or step % every == 0)

  def trajectories(
    self, step: int, episodes: Sequence[Episode], batch: Batch, tokens: TokenRecord
  ) -> None:
    """Stores the first few episodes of the batch, whose order tells nothing about them."""
    ordered = sorted(episodes, key=lambda e: e.sort_key)
    pairs = [(e, t) for e in ordered for t in sorted(e.trajectories, key=lambda t: t.segment)]
    chosen = {e.episode_id for e in ordered[: self._config.trajectories]}
    segments = np.asarray(batch.segment_ids)
    arrays = {name: np.asarray(x) for name, x in tokens._asdict().items() if x is not None}
    for n, (episode, trajectory) in enumerate(pairs):
      if episode.episode_id in chosen:
        here = segments == n + 1
        mine = {name: x[here] for name, x in arrays.items()}
        self._trajectories.write(self._trajectory(step, episode, trajectory, mine))

  def _trajectory(
    self, step: int, episode: Episode, trajectory: Trajectory, tokens: dict[str, np.ndarray]
  ) -> dict[str, Any]:
    mask = trajectory.action_mask

    def numbers(x: np.ndarray | None) -> list[float | None]:
      if x is None:
        return [None] * len(mask)
      return [_short(v) if m else None for v, m in zip(x.tolist(), mask, strict=True)]

    logprobs = tokens.get("logprobs")
    ratio = None if logprobs is None else logprobs - trajectory.rollout_logprobs
    first = int(np.argmax(mask))
    return {
      "step": step,
      "version": step - 1,  # the one being trained
      "episode_id": episode.episode_id,
      "task_id": trajectory.task_id,
      "segment": trajectory.segment,
      "reward": episode.reward,
      "status": episode.status,
      "pieces": [self._chat.decode([t]) for t in trajectory.tokens.tolist()],
      "kind": "".join("a" if m else "p" if i < first else "o" for i, m in enumerate(mask)),
      "policy_version": [
        v if m else None for v, m in zip(trajectory.policy_version.tolist(), mask, strict=True)
      ],
      "logprob": numbers(trajectory.rollout_logprobs),
      "log_ratio": numbers(ratio),
      "advantage": numbers(tokens["advantages"]),
      "value": numbers(tokens["values"]),
    }


def _short(x: float) -> float | None:
  return float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None
