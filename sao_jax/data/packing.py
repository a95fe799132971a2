"""Trajectory → Batch: ragged numpy episodes become one batch of static shapes.

Shapes come from a ladder (``BatchSpec``): the row length is the smallest rung that holds the batch; on
the longest one there are as many times ``rows`` rows as it needs.  So few rows leave little padding and
cost a compilation per multiple, many rows the other way round.  The number of segments is fixed.
Leaves are numpy until the trainer's one ``device_put``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_jax.config import Config
from sao_jax.types import Batch, Episode, Trajectory, Version

SHORTEST_ROW = 64  # shorter rungs would cost a compilation and save next to nothing

_ROW_FIELDS: dict[str, type] = {
  "tokens": np.int32,
  "positions": np.int32,
  "segment_ids": np.int32,
  "action_mask": np.bool_,
  "loss_mask": np.bool_,
  "value_mask": np.bool_,
  "rollout_logprobs": np.float32,
  "staleness": np.int32,
  "temperature": np.float32,
  "rewards": np.float32,
  "discounts": np.float32,
  "bootstrap": np.float32,
}
_SEGMENT_FIELDS: dict[str, type] = {
  "num_actions": np.int32,
  "returns": np.float32,
  "group": np.int32,
  "episode": np.int32,
  "baseline": np.float32,
}


class PackingError(ValueError):
  """Trajectories that do not fit the static shapes, or that cannot be trained as they are."""


@dataclasses.dataclass(frozen=True)
class BatchSpec:
  """The static shapes of a run's batches.

  B is a multiple of ``rows``, ``segments`` is N (room for trajectories), T comes from the ladder
  ``lengths``.
  """

  rows: int
  segments: int
  lengths: tuple[int, ...]

  @classmethod
  def from_config(cls, config: Config, *, batch_size: int | None = None) -> "BatchSpec":
    """The shapes of RL batches, or with ``batch_size`` those of another stage of the same run."""
    episodes = config.batch_size if batch_size is None else batch_size
    rows = (config.packing.rows or episodes) if batch_size is None else episodes
    lengths = tuple(sorted(set(config.packing.lengths))) or length_ladder(config.env.max_tokens)
    return cls(rows, episodes * config.packing.max_segments, lengths)

  def fits(self, sizes: Sequence[int]) -> bool:
    """Whether trajectories of these numbers of tokens go into ``rows`` rows."""
    if len(sizes) > self.segments or max(sizes, default=0) > self.lengths[-1]:
      return False
    return _fit(sizes, self.rows, self.lengths[-1]) is not None

  def zeros(self, length: int) -> Batch:
    """A batch of padding only, with shapes and dtypes as of ``pack``: for warm-up compiles."""
    return Batch(**self._padding(self.rows, length))

  def _padding(self, rows: int, length: int) -> dict[str, Any]:
    shape, n = (rows, length), self.segments
    arrays: dict[str, Any] = {name: np.zeros(shape, dtype) for name, dtype in _ROW_FIELDS.items()}
    arrays["temperature"][:] = 1.0
    arrays.update({name: np.zeros(n, dtype) for name, dtype in _SEGMENT_FIELDS.items()})
    arrays["group"][:] = -1
    arrays["episode"][:] = -1
    return arrays


def length_ladder(longest: int) -> tuple[int, ...]:
  """Powers of two from 64 up; the last rung is ``longest`` itself."""
  rungs = []
  rung = SHORTEST_ROW
  while rung < longest:
    rungs.append(rung)
    rung *= 2
  return (*rungs, longest)


def pack(
  episodes: Sequence[Episode], version: Version, config: Config, *, spec: BatchSpec | None = None
) -> tuple[Batch, dict[str, float]]:
  """Packs finished episodes into one batch.

  Episodes are taken in the order of (task serial, sample), their trajectories by segment;
  trajectory i has segment id i + 1 and entry i of the "N" arrays.  ``group`` counts the groups of
  the batch from 0.  Unused entries have group and episode -1 and zero actions.

  - staleness[t] = version.step − policy_version[t] on actions, 0 elsewhere.
  - loss_mask = action_mask without tokens of staleness > ``rollout.max_staleness`` and, under
    ``rollout.truncation = "mask"``, without truncated trajectories; value_mask = action_mask
    without the latter only.
  - discounts = γ on every token of a trajectory but its last action, where it is 0.
  - bootstrap = 1 at the last token of a truncated trajectory under ``truncation = "bootstrap"``.
  - rewards = scale · reward, plus scale · bias once at the last action: the return becomes
    scale · (return + bias).  An episode of several trajectories gives that return of the whole
    episode to the last action of each of them (``segment_reward = "share"``) or of the last one
    (``"last"``).  ``returns`` is the sum of a trajectory's rewards as trained.

  Args:
    episodes: at most N trajectories in all.
    version: the version being trained.
    config: reads ``rollout``, ``advantage`` and, without ``spec``, ``packing`` and the sizes.
    spec: static shapes; default ``BatchSpec.from_config(config)``.

  Returns:
    The batch with numpy leaves, and metrics of it.

  Raises:
    PackingError: it has too many trajectories or too long a one; a token is of a later version or
      another incarnation; a trajectory has no action, or has one at position 0.
  """
  spec = spec or BatchSpec.from_config(config)
  ordered = sorted(episodes, key=lambda e: e.sort_key)
  pairs = [
    (i, trajectory)
    for i, episode in enumerate(ordered)
    for trajectory in sorted(episode.trajectories, key=lambda t: t.segment)
  ]
  if len(pairs) > spec.segments:
    raise PackingError(
      f"{len(pairs)} trajectories of {len(ordered)} episodes, but the batch has room for "
      f"{spec.segments}: raise packing.max_segments = {config.packing.max_segments}"
    )
  for episode in ordered:
    _check_episode(episode, version)
  (rows, length), places = _place([len(t.tokens) for _, t in pairs], spec)
  arrays = spec._padding(rows, length)
  groups: dict[int, int] = {}
  for n, ((i, trajectory), (row, start)) in enumerate(zip(pairs, places, strict=True)):
    _write(arrays, n, trajectory, row, start, version, config)
    _write_rewards(arrays, n, ordered[i], trajectory, row, start, config)
    arrays["episode"][n] = i
    arrays["group"][n] = groups.setdefault(ordered[i].group, len(groups))
  batch = Batch(**arrays)
  return batch, _metrics(batch, ordered, config)


def unpack(batch: Batch) -> list[dict[str, np.ndarray]]:
  """The "B T" arrays of each trajectory of a packed batch, in the order of the "N" arrays."""
  segments = []
  for n in np.flatnonzero(np.asarray(batch.episode) >= 0):
    here = np.asarray(batch.segment_ids) == n + 1
    segments.append({name: np.asarray(getattr(batch, name))[here] for name in _ROW_FIELDS})
  return segments


def _check_episode(episode: Episode, version: Version) -> None:
  if episode.incarnation != version.incarnation:
    raise PackingError(
      f"episode {episode.episode_id} was sampled in incarnation {episode.incarnation}, training is "
      f"in {version.incarnation}: staleness is a difference of steps within one incarnation"
    )
  if not episode.trajectories:
    raise PackingError(f"episode {episode.episode_id} has no trajectory")
  for trajectory in episode.trajectories:
    where = f"trajectory {trajectory.segment} of episode {episode.episode_id}"
    if not trajectory.action_mask.any():
      raise PackingError(f"{where} has {len(trajectory.tokens)} tokens and no action among them")
    if trajectory.action_mask[0]:
      raise PackingError(f"{where} has an action at position 0, which nothing could have sampled")
    newest = int(trajectory.policy_version[trajectory.action_mask].max())
    if newest > version.step:
      raise PackingError(
        f"{where} has a token of version {newest}, later than version {version.step} being trained"
      )
    if stray := np.flatnonzero((trajectory.rewards != 0) & ~trajectory.action_mask).tolist():
      raise PackingError(f"{where} has rewards at positions {stray} that are not actions")


def _place(sizes: Sequence[int], spec: BatchSpec) -> tuple[tuple[int, int], list[tuple[int, int]]]:
  """The smallest (rows, length) that fits, and (row, start) of each trajectory in it."""
  longest, top = max(sizes, default=0), spec.lengths[-1]
  if longest > top:
    raise PackingError(
      f"a trajectory has {longest} tokens, the longest row {top}: raise packing.lengths or lower "
      "env.max_tokens"
    )
  for length in spec.lengths:
    if longest <= length and (places := _fit(sizes, spec.rows, length)) is not None:
      return (spec.rows, length), places
  rows = 2 * spec.rows
  while (places := _fit(sizes, rows, top)) is None:
    rows += spec.rows  # ends: a row a trajectory always fits
  return (rows, top), places


def _fit(sizes: Sequence[int], rows: int, length: int) -> list[tuple[int, int]] | None:
  """(row, start) of each trajectory, one a row where there are enough rows.

  Else the longest first, into the emptiest row, so that each part of the rows (a minibatch) has its
  share; or, where they do not fit so, into the first row with room.
  """
  if len(sizes) <= rows:
    return [(row, 0) for row in range(len(sizes))]
  for emptiest in (True, False):
    used = np.zeros(rows, np.int64)
    places = [(0, 0)] * len(sizes)
    for n in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
      row = int(np.argmin(used) if emptiest else np.argmax(used + sizes[n] <= length))
      if used[row] + sizes[n] > length:
        break
      places[n] = (row, int(used[row]))
      used[row] += sizes[n]
    else:
      return places
  return None


def _write(
  arrays: dict[str, Any],
  n: int,
  trajectory: Trajectory,
  row: int,
  start: int,
  version: Version,
  config: Config,
) -> None:
  size = len(trajectory.tokens)
  at = (row, slice(start, start + size))
  actions = trajectory.action_mask
  staleness = np.where(actions, version.step - trajectory.policy_version, 0)
  unknown = trajectory.truncated and config.rollout.truncation == "mask"
  last = int(np.flatnonzero(actions)[-1])
  discounts = np.full(size, config.advantage.gamma, np.float32)
  discounts[last] = 0.0
  arrays["tokens"][at] = trajectory.tokens
  arrays["positions"][at] = np.arange(size)
  arrays["segment_ids"][at] = n + 1
  arrays["action_mask"][at] = actions
  arrays["value_mask"][at] = actions & (not unknown)
  arrays["loss_mask"][at] = actions & (not unknown) & (staleness <= config.rollout.max_staleness)
  arrays["rollout_logprobs"][at] = np.where(actions, trajectory.rollout_logprobs, 0.0)
  arrays["staleness"][at] = staleness
  arrays["temperature"][at] = trajectory.temperature
  arrays["discounts"][at] = discounts
  if trajectory.truncated and config.rollout.truncation == "bootstrap":
    arrays["bootstrap"][row, start + size - 1] = 1.0
  arrays["num_actions"][n] = actions.sum()


def _write_rewards(
  arrays: dict[str, Any],
  n: int,
  episode: Episode,
  trajectory: Trajectory,
  row: int,
  start: int,
  config: Config,
) -> None:
  scale, bias = config.advantage.reward_scale, config.advantage.reward_bias
  last = int(np.flatnonzero(trajectory.action_mask)[-1])
  rewards = np.zeros(len(trajectory.tokens), np.float64)
  if len(episode.trajectories) == 1:
    rewards[:] = scale * trajectory.rewards.astype(np.float64)
    rewards[last] += scale * bias
  else:
    final = max(t.segment for t in episode.trajectories)
    if config.rollout.segment_reward == "share" or trajectory.segment == final:
      total = sum(float(t.rewards.sum(dtype=np.float64)) for t in episode.trajectories)
      rewards[last] = scale * (total + bias)
  arrays["rewards"][row, start : start + len(rewards)] = rewards
  arrays["returns"][n] = rewards.sum()


def _metrics(batch: Batch, episodes: Sequence[Episode], config: Config) -> dict[str, float]:
  actions, trained = np.asarray(batch.action_mask), np.asarray(batch.loss_mask)
  staleness = np.asarray(batch.staleness)
  tokens = int((np.asarray(batch.segment_ids) > 0).sum())
  num_actions = int(actions.sum())
  stale = int((staleness > config.rollout.max_staleness).sum())

  def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0

  metrics = {
    "batch/rows": float(actions.shape[0]),
    "batch/row_length": float(actions.shape[1]),
    "batch/fill": tokens / actions.size,
    "batch/tokens": float(tokens),
    "batch/action_tokens": float(num_actions),
    "batch/trained_tokens": float(trained.sum()),
    "batch/episodes": float(len(episodes)),
    "staleness/mean": float(staleness.sum() / max(num_actions, 1)),
    "staleness/max": float(staleness.max(initial=0)),
    "staleness/trained_max": float(staleness[trained].max(initial=0)),
    "staleness/masked_share": stale / max(num_actions, 1),
    "episode/reward": mean([e.reward for e in episodes]),
    "episode/actions": mean([e.num_actions for e in episodes]),
    "episode/truncated_share": mean([e.status == "truncated" for e in episodes]),
  }
  for name in sorted({name for e in episodes for name in e.metrics}):
    # Sums over an episode's steps: one that never counted something counted 0 of it.
    metrics[f"episode/{name}"] = mean([e.metrics.get(name, 0.0) for e in episodes])
  return metrics
