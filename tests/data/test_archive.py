"""Episodes on disk: what comes back is what went in, bit for bit."""

import dataclasses

import numpy as np
import pytest

from sao_jax.data.archive import episodes_from_bytes, episodes_to_bytes
from sao_jax.types import Episode, Trajectory


def episode(rng: np.random.Generator, index: int) -> Episode:
  trajectories = []
  for segment in range(int(rng.integers(1, 4))):
    n = int(rng.integers(1, 40))
    trajectories.append(
      Trajectory(
        task_id=f"aufgabe ä:{index}",
        episode_id=f"{index}.0.1",
        segment=segment,
        group=index,
        tokens=rng.integers(0, 2**31 - 1, n, np.int32),
        action_mask=rng.random(n) < 0.5,
        rollout_logprobs=rng.normal(size=n).astype(np.float32),
        policy_version=rng.integers(-1, 9, n).astype(np.int32),
        temperature=rng.random(n).astype(np.float32),
        rewards=rng.normal(size=n).astype(np.float32),
        truncated=bool(rng.random() < 0.5),
        metrics={"x": 0.1},
        routes=rng.integers(0, 8, (n, 2, 2)).astype(np.int32)
        if segment
        else np.zeros((0, 0, 0), np.int32),
      )
    )
  return Episode(
    f"{index}.0.1", index, 0, 1, index, tuple(trajectories), "truncated", 1 / 3, 4, 1.0, 2.0, {"a": 0.5}
  )  # fmt: skip


def test_round_trip_is_exact():
  rng = np.random.default_rng(0)
  episodes = [episode(rng, i) for i in range(20)]
  back = episodes_from_bytes(episodes_to_bytes(episodes))
  assert len(back) == 20
  for old, new in zip(episodes, back, strict=True):
    for field in dataclasses.fields(Episode):
      if field.name not in ("trajectories", "started", "finished"):
        assert getattr(old, field.name) == getattr(new, field.name)
    assert new.started == new.finished == 0
    for a, b in zip(old.trajectories, new.trajectories, strict=True):
      for field in dataclasses.fields(Trajectory):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
          assert x.dtype == y.dtype
          assert x.tobytes() == y.tobytes()
          assert x.shape == y.shape
        else:
          assert x == y


def test_no_episodes_and_what_is_no_archive():
  assert episodes_from_bytes(episodes_to_bytes([])) == []
  with pytest.raises(ValueError):
    episodes_from_bytes(b"something else")
