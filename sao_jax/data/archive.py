"""Episodes ↔ bytes: how finished episodes wait on disk for a resumed run, bit for bit."""

import dataclasses
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_jax.types import Episode, Trajectory

_ARRAYS = (
  *("tokens", "action_mask", "rollout_logprobs", "policy_version", "temperature", "rewards"),
  "routes",
)


def episodes_to_bytes(episodes: Sequence[Episode]) -> bytes:
  """One npz archive: each array of all trajectories end to end, and the rest as JSON.

  Times (``started``, ``finished``) are of a clock that ends with the process: they are not kept.
  """
  trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
  arrays: dict[str, Any] = {
    name: np.concatenate([np.ravel(getattr(t, name)) for t in trajectories] or [np.zeros(0)])
    for name in _ARRAYS
  }
  heads = json.dumps([_episode_head(episode) for episode in episodes]).encode()
  buffer = io.BytesIO()
  np.savez(buffer, heads=np.frombuffer(heads, np.uint8), **arrays)
  return buffer.getvalue()


def episodes_from_bytes(data: bytes) -> list[Episode]:
  """The inverse of ``episodes_to_bytes``.  Raises ValueError for anything else."""
  with np.load(io.BytesIO(data), allow_pickle=False) as archive:
    arrays = {name: archive[name] for name in _ARRAYS}
    heads = json.loads(archive["heads"].tobytes())
  used = dict.fromkeys(_ARRAYS, 0)

  def take(name: str, shape: Sequence[int]) -> np.ndarray:
    start = used[name]
    used[name] = stop = start + int(np.prod(shape))
    return arrays[name][start:stop].reshape(shape)

  return [_episode(head, take) for head in heads]


def _head(item: Any, without: Sequence[str]) -> dict[str, Any]:
  names = [field.name for field in dataclasses.fields(item) if field.name not in without]
  return {name: getattr(item, name) for name in names}


def _episode_head(episode: Episode) -> dict[str, Any]:
  head = _head(episode, ("trajectories", "started", "finished"))
  head["trajectories"] = [
    _head(t, _ARRAYS) | {"shapes": {name: np.shape(getattr(t, name)) for name in _ARRAYS}}
    for t in episode.trajectories
  ]
  return head


def _episode(head: dict[str, Any], take: Any) -> Episode:
  trajectories = []
  for part in head.pop("trajectories"):
    shapes = part.pop("shapes")
    trajectories.append(Trajectory(**part, **{name: take(name, shapes[name]) for name in _ARRAYS}))
  return Episode(**head, trajectories=tuple(trajectories))
