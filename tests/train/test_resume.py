"""Runs that are killed: what is on the disk afterwards is what an uninterrupted run leaves."""

import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from sao_jax import loader
from sao_jax.config import ConfigError
from sao_jax.train.checkpoint import Checkpoints
from sao_jax.train.folder import locked
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.preemption import Preemption
from sao_jax.train.run import evaluate, train
from sao_jax.train.sft import sft
from sao_jax.train.state import load_policy

TINY = str(pathlib.Path(__file__).with_name("tiny.py"))
# What depends on when things happen, not on what is trained.
CLOCK = ("time/", "throughput/", "engine/", "queue/", "accounting/running", "accounting/started")


def command(folder: pathlib.Path, *overrides: str) -> list[str]:
  start = [sys.executable, "-m", "sao_jax.cli", "train", f"--config={TINY}"]
  return [*start, f"--config.run_dir={folder}", *overrides]


def start(folder: pathlib.Path, *overrides: str) -> subprocess.Popen:
  with (folder.parent / f"{folder.name}.log").open("a") as log:
    return subprocess.Popen(command(folder, *overrides), stdout=log, stderr=log)


def log_of(folder: pathlib.Path) -> str:
  return (folder.parent / f"{folder.name}.log").read_text()


def rows(path: pathlib.Path) -> list[dict]:
  return read_rows(path) if path.exists() else []


def wait_for(process: subprocess.Popen, reached, seconds: float = 300.0) -> None:
  deadline = time.monotonic() + seconds
  while process.poll() is None and not reached():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def kill(process: subprocess.Popen) -> None:
  process.kill()
  process.wait()


def arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Every array of the newest checkpoint, read without the program's help."""
  import orbax.checkpoint as ocp

  newest = max(int(p.name) for p in folder.iterdir() if p.name.isdigit())
  found = {}
  for item in ("policy", "critic", "state"):
    path = folder / str(newest) / item
    if path.exists():
      tree = ocp.StandardCheckpointer().restore(path.absolute())
      found |= {f"{item}/{name}": np.asarray(x) for name, x in tree.items()}
  assert found
  return found


def assert_same_arrays(a: pathlib.Path, b: pathlib.Path) -> None:
  one, two = arrays(a), arrays(b)
  assert one.keys() == two.keys()
  for name, x in one.items():
    np.testing.assert_array_equal(x, two[name], err_msg=name)


def without_clock(found: list[dict]) -> list[dict]:
  return [
    {k: v for k, v in row.items() if not k.startswith(CLOCK) and not k.endswith("_seconds")}
    for row in found
  ]


@pytest.mark.slow
def test_every_stage_killed_halfway_ends_bit_equal(tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  assert start(whole).wait() == 0, log_of(whole)
  for part, step in (("sft", 63), ("value", 13), ("", 12)):
    process = start(killed)
    wait_for(process, lambda p=part, s=step: len(rows(killed / p / "metrics.jsonl")) > s)
    kill(process)
  assert start(killed).wait() == 0, log_of(killed)
  assert re.search("going on from step (5|10|15) of 20", log_of(killed))
  for part in ("sft", "value", ""):
    assert_same_arrays(whole / part / "checkpoints", killed / part / "checkpoints")
    one, two = (rows(folder / part / "metrics.jsonl") for folder in (whole, killed))
    assert [row["step"] for row in two] == [row["step"] for row in one]
    assert without_clock(one) == without_clock(two)
  rewards = [row["episode/reward"] for row in rows(whole / "metrics.jsonl")[1:]]
  assert 0 < np.mean(rewards) < 1  # there was something to get wrong
  for name in ("episodes.jsonl", "trajectories.jsonl"):
    assert rows(whole / name) == rows(killed / name)
  assert json.loads((whole / "results.json").read_text()) == json.loads(
    (killed / "results.json").read_text()
  )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_an_asynchronous_run_survives_kills_at_random_moments(tmp_path):
  """``KILLS=25`` for more of them."""
  kills, bound, steps = int(os.environ.get("KILLS", "4")), 2, 60
  folder, rng = tmp_path / "run", random.Random(0)
  changes = (f"--config.rollout.max_staleness={bound}", f"--config.num_steps={steps}")
  changes += (
    "--config.checkpoint.every=1",
    "--config.sft.steps=20",
    "--config.evaluate.greedy=false",
  )
  seen: list[tuple[int, int]] = []
  for _ in range(kills):
    process = start(folder, *changes)
    before = len(rows(folder / "metrics.jsonl"))
    ahead = before + rng.randrange(1, 4)
    wait_for(process, lambda n=ahead: len(rows(folder / "metrics.jsonl")) >= n)
    time.sleep(rng.random() * 0.3)
    if process.poll() is None:
      kill(process)
    found = rows(folder / "metrics.jsonl")
    seen.append((int((folder / "incarnation").read_text()), found[-1]["step"] if found else 0))
  assert start(folder, *changes).wait() == 0, log_of(folder)
  assert [i for i, _ in seen] == sorted(i for i, _ in seen)
  found = rows(folder / "metrics.jsonl")
  assert [row["step"] for row in found] == list(range(steps + 1))
  assert max(row["staleness/trained_max"] for row in found[1:]) <= bound
  trained = rows(folder / "episodes.jsonl")
  assert len(trained) == steps * 8
  serials = collections.Counter(row["serial"] for row in trained)
  assert max(serials.values()) == 1
  # None is lost: those below the largest that were not trained wait or run at the end.
  assert max(serials) < steps * 8 + (bound + 1) * 8
  accounts = found[-1]
  ends = ("trained", "dropped", "failed", "queued", "running", "in_training")
  assert accounts["accounting/started"] == sum(accounts[f"accounting/{name}"] for name in ends)
  assert accounts["accounting/trained"] == steps * 8
  assert "damaged" not in log_of(folder)


MOMENTS = ["compiling the engine", "evaluating", "rolling out", "compiling the training step"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["sft", "loop", *MOMENTS])
def test_sigterm_saves_and_asks_to_be_started_again(tmp_path, when):
  folder = tmp_path / "run"
  part = folder / "sft" if when == "sft" else folder
  quick = ("--config.sft.steps=40",)
  process = start(folder, *quick)
  if when in MOMENTS:
    wait_for(process, lambda: when in log_of(folder))
  else:
    wait_for(process, lambda: len(rows(part / "metrics.jsonl")) > 7)
  process.send_signal(signal.SIGTERM)
  asked = time.monotonic()
  assert process.wait() == 75, log_of(folder)
  assert time.monotonic() - asked < 30
  assert "run the same command to go on" in log_of(folder)
  if when not in MOMENTS:
    done = rows(part / "metrics.jsonl")[-1]["step"]
    assert (part / "checkpoints" / str(done)).is_dir()
  assert start(folder, *quick).wait() == 0
  assert [row["step"] for row in rows(folder / "metrics.jsonl")] == list(range(21))


FULL = """
set -eu
mount -t tmpfs -o size="$2" none "$1"
set +e; "${@:3}" --config.run_dir="$1/run"; echo "status $?"
echo "kept $(ls -d "$1"/run/checkpoints/[0-9]* | grep -vc sha256)"; set -e
mount -o remount,size=64m "$1"
"${@:3}" --config.run_dir="$1/run"
cp "$1/run/metrics.jsonl" "$METRICS"
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["300k", "2600k"])  # less than one checkpoint, and some of them
def test_a_full_disk_ends_the_run_by_name_and_it_goes_on_once_there_is_room(tmp_path, size):
  alone = ["unshare", "--user", "--map-root-user", "--mount"]
  probe = [*alone, "mount", "-t", "tmpfs", "none", str(tmp_path)]
  if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
    pytest.skip("nobody may mount a small file system here")
  run = command(tmp_path, "--config.checkpoint.every=2", "--config.sft.steps=20")
  run = [part for part in run if not part.startswith("--config.run_dir")]
  done = subprocess.run(
    [*alone, "bash", "-c", FULL, "full", str(tmp_path), size, *run],
    capture_output=True,
    text=True,
    timeout=500,
    check=False,
    env={**os.environ, "METRICS": str(tmp_path.parent / "metrics.jsonl")},
  )
  said = done.stdout + done.stderr
  assert done.returncode == 0, said[-3000:]
  assert "status 1" in said
  assert "No space left on device" in said
  assert "Make room and run the same command" in said
  if size == "2600k":
    assert re.search("kept [1-9]", said)
    assert re.search("going on from step [1-9]", said)
  found = rows(tmp_path.parent / "metrics.jsonl")
  assert [row["step"] for row in found] == list(range(21))


@pytest.mark.slow
def test_evaluation_on_a_schedule_changes_nothing_that_is_trained(tmp_path):
  folders = tmp_path / "without", tmp_path / "with"
  quick = ("--config.sft.steps=40", "--config.num_steps=8")
  assert start(folders[0], *quick).wait() == 0
  assert start(folders[1], *quick, "--config.evaluate.every=2").wait() == 0
  assert_same_arrays(*(folder / "checkpoints" for folder in folders))
  assert rows(folders[0] / "episodes.jsonl") == rows(folders[1] / "episodes.jsonl")
  measured = sorted((folders[1] / "evaluations").iterdir())
  before = [path.read_bytes() for path in measured]
  alone = {"evaluate.temperature": "0", "evaluate.problems": "4", "run_dir": str(folders[1])}
  twice = [evaluate(loader.load(TINY, alone)) for _ in range(2)]
  assert twice[0] == twice[1]
  assert [path.read_bytes() for path in measured] == before
  evaluated = [row["step"] for row in rows(folders[1] / "metrics.jsonl") if "eval/sampled" in row]
  assert evaluated == [0, 2, 4, 6, 8]


def small(tmp_path, **changes):
  quick = {"sft.steps": "20", "run_dir": str(tmp_path / "run")}
  return loader.load(TINY, quick | changes)


def test_what_would_not_continue_a_run_is_refused_with_the_difference(tmp_path):
  config = small(tmp_path)
  sft(config, load_policy(config), Preemption())
  other = small(tmp_path, **{"sft.lr": "0.02", "task.digits": "2"})
  with pytest.raises(
    ConfigError, match=r"(?s)sft.lr: 0.01 in the checkpoint, 0.02 now.*task.digits: 1"
  ):
    sft(other, load_policy(other), Preemption())
  kept = small(
    tmp_path, **{"evaluate.samples": "4", "checkpoint.keep": "2"}
  )  # nothing is trained by it
  sft(kept, load_policy(kept), Preemption())


def test_a_stage_whose_last_checkpoint_is_damaged_is_not_taken_for_finished(tmp_path):
  config = small(tmp_path)
  whole = sft(config, load_policy(config), Preemption(), lambda _: None)
  newest = config.folder / "sft" / "checkpoints" / "20"
  data = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
  data.write_bytes(data.read_bytes()[:-1])
  said: list[str] = []
  again = sft(config, load_policy(config), Preemption(), said.append)
  assert any("checkpoint of step 20 is damaged" in line for line in said)
  assert not any("finished before" in line for line in said)
  for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(again.params), strict=True):
    np.testing.assert_array_equal(a, b)
  assert [row["step"] for row in rows(config.folder / "sft" / "metrics.jsonl")] == list(
    range(1, 21)
  )


def test_an_evaluation_before_any_checkpoint_is_refused_and_trains_nothing(tmp_path):
  config = small(tmp_path)
  config.folder.mkdir()
  with pytest.raises(ConfigError, match="has no checkpoint yet"):
    evaluate(config)
  assert not (config.folder / "sft").exists()


def test_a_second_process_in_the_same_folder_is_refused(tmp_path):
  config = small(tmp_path)
  config.folder.mkdir()
  with locked(config.folder), pytest.raises(ConfigError, match="in use by another process"):
    train(config)


def test_checkpoints_are_kept_and_dropped_as_asked(tmp_path):
  config = small(tmp_path, **{"checkpoint.keep": "2", "checkpoint.keep_every": "4"})
  tree = {"x": jax.numpy.arange(3.0)}
  with Checkpoints(tmp_path / "c", config.checkpoint, 1) as checkpoints:
    for step in range(1, 10):
      checkpoints.save(step, {"state": tree}, {"n": step})
    checkpoints.wait()
    assert checkpoints.steps() == [4, 8, 9]
