"""Experiments: each runs to its table, goes on where it was stopped, and refuses what it cannot do."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from sao_jax.config import ConfigError
from sao_jax.train.experiment import cells, read, run_experiment
from sao_jax.train.jsonlines import read_rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "configs" / "experiments").glob("*.py"))

TWO_ARMS = f"""
from sao_jax.train.experiment import Arm, Experiment
from sao_jax.train.tables import final

def get_experiment():
  tiny = "{pathlib.Path(__file__).with_name("tiny.py")}"
  return Experiment(
    name="two",
    question="Which?",
    arms=(Arm("a", tiny), Arm("b", tiny, {{"critic.lr": 2e-3}})),
    columns={{"held-out reward": final("eval/sampled")}},
    baseline="a",
    compared=("held-out reward",),
    changes={{"num_steps": 3, "evaluate.greedy": False}},
  )
"""


def command(path, *options):
  return [sys.executable, "-m", "sao_jax.cli", "experiment", str(path), *options]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_is_resolved_for_every_seed(path):
  """Every arm's settings, before hours are spent on the first."""
  experiment = read(str(path))
  assert experiment.name == path.stem
  assert f"sao-jax experiment configs/experiments/{path.name}" in path.read_text()
  for small in (False, True):
    found = cells(experiment, pathlib.Path("runs"), experiment.seeds, small)
    assert len(found) == len(experiment.arms) * len(experiment.seeds)
    assert len({cell.config.folder for cell in found}) == len(found)
  assert len(experiment.seeds) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_an_experiment_runs_to_its_table(path, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  table = run_experiment(str(path), small=True)
  experiment = read(str(path))
  lines = [line for line in table.read_text().splitlines() if line.startswith("|")]
  assert len(lines) == 2 + len(experiment.arms)
  for line in lines:
    assert all(cell.strip() for cell in line.strip("|").split("|"))
    assert "nan" not in line
  assert table.with_suffix(".png").stat().st_size > 20_000
  recorded = {
    name for file in table.parent.glob("*/metrics.jsonl") for row in read_rows(file) for name in row
  }
  assert recorded.issuperset(experiment.curves)
  assert not json.loads(table.with_suffix(".json").read_text())["failures"]


@pytest.mark.slow
def test_a_stopped_experiment_goes_on_and_shares_its_stages(tmp_path):
  path = tmp_path / "two.py"
  path.write_text(TWO_ARMS)
  runs = tmp_path / "runs" / "experiments" / "two"
  process = subprocess.Popen(command(path, "--seeds=0"), cwd=tmp_path, stdout=subprocess.DEVNULL)
  try:
    deadline = time.monotonic() + 300
    while not (runs / "a-seed0" / "results.json").exists():
      assert process.poll() is None
      assert time.monotonic() < deadline
      time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
  finally:
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
  done = subprocess.run(command(path, "--seeds=0"), cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "2 runs in runs/experiments/two, 1 done before" in done.stdout
  assert "| b | 1 |" in done.stdout
  assert "sft: finished before" in (runs / "b-seed0" / "console.log").read_text()
  again = subprocess.run(command(path, "--seeds=0"), cwd=tmp_path, capture_output=True, text=True)
  assert "2 done before" in again.stdout

  path.write_text(TWO_ARMS.replace('"num_steps": 3', '"num_steps": 3, "policy.lr": 5e-4'))
  other = subprocess.run(command(path, "--seeds=0"), cwd=tmp_path, capture_output=True, text=True)
  assert other.returncode == 2
  assert "was run with policy.lr = 0.001, now 0.0005" in other.stderr


@pytest.mark.slow
def test_an_arm_of_which_every_run_fails_is_a_row_of_the_table(tmp_path):
  path = tmp_path / "two.py"
  bad = '{"sft.lr": 1e30, "sft.clip_norm": 1e18}'
  path.write_text(TWO_ARMS.replace('{"critic.lr": 2e-3}', bad))
  done = subprocess.run(command(path, "--seeds=0"), cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "b, seed 0: failed with status 1: sao-jax: sft, update" in done.stdout
  assert "| b | 0 of 1 | failed | failed | failed | no seed to compare |" in done.stdout
  assert "Failed: b, seed 0: sao-jax: sft, update" in done.stdout
  assert "| a | 1 | 0" in done.stdout


@pytest.fixture
def heeded_ctrl_c():
  """Has children heed ctrl-C: a shell that runs tests in the background has them ignore it.

  A handler, unlike what is ignored, is not inherited: a new program begins with the default.  Popen's
  preexec_fn would do, but forks, which JAX warns of.
  """
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_ctrl_c_ends_the_run_that_runs_and_begins_no_other(tmp_path, heeded_ctrl_c):
  path = tmp_path / "two.py"
  path.write_text(TWO_ARMS)
  runs = tmp_path / "runs" / "experiments" / "two"
  process = subprocess.Popen(
    command(path, "--seeds=0,1"), cwd=tmp_path, stderr=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL, start_new_session=True,
  )  # fmt: skip
  try:
    deadline = time.monotonic() + 300
    while not (runs / "a-seed0" / "sft" / "metrics.jsonl").exists():
      assert process.poll() is None
      assert time.monotonic() < deadline
      time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
  finally:
    if process.poll() is None:
      os.kill(process.pid, signal.SIGKILL)
  assert "run the same command" in (runs / "a-seed0" / "console.log").read_text()
  assert [p.name for p in runs.iterdir()] == ["a-seed0"]


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("def get_experiment", "def other", r"has no get_experiment\(\)"),
    ('Arm("b"', 'Arm("a"', "two arms have the same name, or folder: a, a"),
    ('Arm("a", tiny), Arm("b"', 'Arm("a b", tiny), Arm("a-b"', "same name, or folder: a b, a-b"),
    ('name="two"', 'name="one/two"', "'one/two' names a folder or file: leave slashes out"),
    ("tiny = ", "1 / 0; tiny = ", "line 6: ZeroDivisionError: division by zero"),
    ('baseline="a"', 'baseline="c"', "baseline = 'c' is none of a, b"),
    ('compared=("held-out', 'compared=("held', "compared = 'held reward' is none of held-out"),
    ('("held-out reward",)', '"held-out reward"', "is one string: write a|parameter 'compared'"),
    ('"critic.lr"', '"critc.lr"', r"critic\.lr"),
  ],
)
def test_what_cannot_be_tabulated_is_refused(tmp_path, monkeypatch, old, new, message):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / "two.py"
  path.write_text(TWO_ARMS.replace(old, new))
  with pytest.raises(ConfigError, match=message):
    run_experiment(str(path))
  assert not (tmp_path / "runs").exists()


def test_no_file_and_no_seed_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ConfigError, match=r"Found here: configs/experiments/adaptation\.py"):
    run_experiment("configs/experiments/nothing.py")
  path = tmp_path / "two.py"
  path.write_text(TWO_ARMS)
  with pytest.raises(ConfigError, match="jobs = 0"):
    run_experiment(str(path), jobs=0)
  with pytest.raises(ConfigError, match="no seed twice"):
    run_experiment(str(path), seeds=[3, 3])


def test_a_run_with_damaged_results_is_not_done(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = tmp_path / "two.py"
  path.write_text(TWO_ARMS)
  cell = cells(read(str(path)), tmp_path, [0], False)[0]
  cell.config.folder.mkdir()
  for text in ('{"step": 3', "[]", '{"step": 3}'):
    (cell.config.folder / "results.json").write_text(text)
    assert not cell.done()
