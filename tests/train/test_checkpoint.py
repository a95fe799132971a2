"""Checkpoints against damage and a full disk: named, and the last good one is what counts."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.config import CheckpointConfig
from sao_jax.train.checkpoint import CheckpointError, Checkpoints, next_incarnation


def state(value: float) -> dict:
  return {"params": {"w": jnp.full((64, 64), value)}, "count": jnp.int32(value)}


def saved(folder, steps, said=None) -> None:
  with Checkpoints(folder, CheckpointConfig(), 1, (said or []).append) as checkpoints:
    for step in steps:
      checkpoints.save(step, {"policy": state(step)}, {"at": step}, b"blob" * step)


def restored(folder, said):
  with Checkpoints(folder, CheckpointConfig(), 1, said.append) as checkpoints:
    return checkpoints.restore({"policy": jax.eval_shape(lambda: state(0))})


def test_what_was_saved_comes_back_exactly(tmp_path):
  saved(tmp_path, [3])
  found = restored(tmp_path, [])
  assert found.step == found.meta["at"] == 3
  assert found.blob == b"blob" * 3
  np.testing.assert_array_equal(found.trees["policy"]["params"]["w"], np.full((64, 64), 3.0))
  assert found.trees["policy"]["count"] == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, damage):
  saved(tmp_path, [1, 2])
  data = max(
    (p for p in (tmp_path / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )
  content = bytearray(data.read_bytes())
  if damage == "remove":
    data.unlink()
  else:
    content[len(content) // 2] ^= 1
    data.write_bytes(content[: len(content) // 2] if damage == "truncate" else content)
  said: list[str] = []
  assert restored(tmp_path, said).step == 1
  assert "checkpoint of step 2 is damaged" in said[0]
  assert (tmp_path / "damaged-2").is_dir()
  saved(tmp_path, [2])  # its number is free again
  assert restored(tmp_path, said).step == 2


def test_when_all_are_damaged_nothing_starts_over_silently(tmp_path):
  saved(tmp_path, [1])
  for path in (tmp_path / "1").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged"):
    restored(tmp_path, [])


def test_an_intact_checkpoint_of_another_model_is_not_called_damaged(tmp_path):
  saved(tmp_path, [1])
  with Checkpoints(tmp_path, CheckpointConfig(), 1) as checkpoints:
    with pytest.raises(CheckpointError, match="is intact, but does not fit"):
      checkpoints.restore({"policy": {"other": jnp.zeros(3)}})
    assert checkpoints.steps() == [1]


def test_a_half_written_checkpoint_is_never_restored(tmp_path):
  saved(tmp_path, [1])
  (tmp_path / "2.orbax-checkpoint-tmp-1234").mkdir()
  assert restored(tmp_path, []).step == 1


FULL_DISK = """
import json, resource, signal, sys
from pathlib import Path
from tests.train.test_checkpoint import Checkpoints, CheckpointConfig, CheckpointError, saved, state
folder = Path(sys.argv[1])
saved(folder, [1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))  # writes fail from here on
said, failure = [], ""
with Checkpoints(folder, CheckpointConfig(), 1, said.append) as checkpoints:
  checkpoints.save(2, {"policy": state(2)}, {})
  try:
    checkpoints.require(2)
  except CheckpointError as error:
    failure = str(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
with Checkpoints(folder, CheckpointConfig(), 1, said.append) as checkpoints:
  step = checkpoints.restore({"policy": state(0)}).step
saved(folder, [2])
with Checkpoints(folder, CheckpointConfig(), 1, said.append) as checkpoints:
  print(json.dumps([said, failure, step, checkpoints.steps()]))
"""


def test_a_write_that_fails_is_named_and_leaves_the_last_good_one(tmp_path):
  done = subprocess.run(
    [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=120
  )
  assert done.returncode == 0, done.stderr[-2000:]
  said, failure, step, steps = json.loads(done.stdout.splitlines()[-1])
  assert "checkpoint of step 2 failed" in said[0]
  assert "could not be written" in failure
  assert "it goes on from step 1" in failure
  assert step == 1
  assert steps == [1, 2]


def test_incarnations_only_go_up(tmp_path):
  assert [next_incarnation(tmp_path / "run") for _ in range(3)] == [1, 2, 3]


def test_a_reader_leaves_the_folder_of_a_living_run_alone(tmp_path):
  saved(tmp_path, [1, 2])
  writing = tmp_path / "3.orbax-checkpoint-tmp-1234"
  writing.mkdir()
  data = max(
    (p for p in (tmp_path / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
  )
  data.write_bytes(b"")
  before = sorted(p.name for p in tmp_path.iterdir())
  with Checkpoints(tmp_path, CheckpointConfig(), 1, print, read_only=True) as checkpoints:
    assert checkpoints.restore({"policy": state(0)}).step == 1
  assert sorted(p.name for p in tmp_path.iterdir()) == before
