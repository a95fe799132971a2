"""Starting again in a folder that is not as one left it: named, repaired or refused, never trained wrong."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading

import pytest

from sao_jax import loader
from sao_jax.config import ConfigError
from sao_jax.outcome import Preempted, RunFailed
from sao_jax.rollout.service import RolloutService
from sao_jax.train import checkpoint
from sao_jax.train import sft as supervised
from sao_jax.train.checkpoint import CheckpointError
from sao_jax.train.evaluate import Evaluation
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.run import evaluate, export, sft, train

pytestmark = pytest.mark.slow
TINY = str(pathlib.Path(__file__).with_name("tiny.py"))
STEPS = 4


def config_of(folder, **changes):
  quick = {
    "sft.steps": 20,
    "num_steps": STEPS,
    "checkpoint.every": 2,
    "value_pretrain.rollouts": 16,
  }
  quick |= {"evaluate.problems": 4, "report.enabled": False, "run_dir": str(folder)}
  return loader.load(TINY, quick | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("restart") / "base"
  train(config_of(folder))
  return folder


@pytest.fixture
def run(finished, tmp_path):
  """A copy of a finished run of 4 steps, with checkpoints 2 and 4."""
  return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def as_killed_at(folder, step):
  """As a kill leaves it: no results, no later checkpoint."""
  (folder / "results.json").unlink()
  for path in (folder / "checkpoints").iterdir():
    if int(path.name.split(".")[0]) > step:
      shutil.rmtree(path) if path.is_dir() else path.unlink()


def damage(folder, step):
  data = max(
    (p for p in (folder / "checkpoints" / str(step)).rglob("*") if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  content = bytearray(data.read_bytes())
  content[len(content) // 2] ^= 255
  data.write_bytes(content)


def steps_of(folder):
  return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


@contextlib.contextmanager
def stopped_at_evaluation(monkeypatch, number):
  """SIGTERM at the start of the n-th evaluation of the process."""
  count = [0]
  original = RolloutService.run

  def run(self, *args, **kwargs):
    count[0] += 1
    if count[0] == number:
      os.kill(os.getpid(), signal.SIGTERM)
      threading.Event().wait(0.3)
    return original(self, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(RolloutService, "run", run)
    yield


def test_an_extended_run_stopped_in_its_last_evaluation_is_not_complete(run, monkeypatch):
  longer = config_of(run, num_steps=6)
  with stopped_at_evaluation(monkeypatch, 1), pytest.raises(Preempted):
    train(longer)
  results = train(longer)
  assert results["step"] == 6
  assert (run / "evaluations" / "step-000006.json").exists()
  assert "eval/sampled" in read_rows(run / "metrics.jsonl")[-1]


def test_a_stop_in_a_scheduled_evaluation_saves_its_step(tmp_path, monkeypatch):
  config = config_of(tmp_path / "run", **{"evaluate.every": 3, "checkpoint.every": 100})
  # Before RL: sampled, greedy; the critic's rollouts; then that of step 3.
  with stopped_at_evaluation(monkeypatch, 4), pytest.raises(Preempted):
    train(config)
  assert (config.folder / "checkpoints" / "3").is_dir()
  train(config)
  rows = read_rows(config.folder / "metrics.jsonl")
  assert [row["step"] for row in rows if "eval/sampled" in row] == [0, 3, 4]
  assert steps_of(config.folder) == [0, 1, 2, 3, 4]


def test_fewer_steps_than_were_done_are_refused(run):
  with pytest.raises(ConfigError, match=r"num_steps = 3, but .* checkpoint of step 4"):
    train(config_of(run, num_steps=3))
  as_killed_at(run, 4)
  with pytest.raises(ConfigError, match=r"num_steps = 3, but .* checkpoint of step 4"):
    train(config_of(run, num_steps=3))
  assert not (run / "evaluations" / "step-000003.json").exists()


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_every_time(run):
  as_killed_at(run, 4)
  for step in (2, 4):
    damage(run, step)
  before = (run / "metrics.jsonl").read_bytes()
  for _ in range(2):
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
      train(config_of(run))
  assert (run / "metrics.jsonl").read_bytes() == before


def test_an_error_of_the_system_puts_nothing_aside(run, monkeypatch):
  as_killed_at(run, 4)

  def stale(folder):
    raise OSError(116, "Stale file handle")

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint, "_digests", stale)
    with pytest.raises(CheckpointError, match=r"could not be read: OSError.*Stale"):
      train(config_of(run))
  assert sorted(p.name for p in (run / "checkpoints").iterdir() if p.is_dir()) == ["2", "4"]
  train(config_of(run))


def test_every_checkpoint_of_a_run_is_sealed(run):
  folder = run / "checkpoints"
  assert {p.stem for p in folder.glob("*.sha256")} == {"2", "4"}
  as_killed_at(run, 2)
  (folder / "2.sha256").write_text("")  # as if killed just before it was written
  train(config_of(run))
  assert json.loads((folder / "2.sha256").read_text())


def test_a_longer_run_has_the_same_learning_rates(tmp_path):
  """The warm-up of 10 steps ends after the first part; both ways end bit-equal."""
  warm = {"critic.warmup_steps": 10, "policy.warmup_steps": 10, "rollout.max_staleness": 0}
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  train(config_of(whole, **warm, num_steps=6))
  train(config_of(parts, **warm, num_steps=4))
  train(config_of(parts, **warm, num_steps=6))
  one, two = read_rows(whole / "metrics.jsonl"), read_rows(parts / "metrics.jsonl")
  for name in ("policy/loss", "critic/loss", "policy/grad_norm", "episode/reward"):
    assert [row.get(name) for row in one] == [row.get(name) for row in two]


def test_another_tokenizer_under_the_same_name_is_refused(run, tmp_path):
  from sao_jax.train.identity import run_identity

  path = tmp_path / "tokenizer.json"
  config = config_of(run, **{"chat.format": "plain", "chat.tokenizer": str(path)})
  path.write_text("{}")
  before = run_identity(config)
  path.write_text("[]")
  assert before["tokenizer"] != run_identity(config)["tokenizer"]


def test_the_last_line_is_there_at_any_moment_of_its_second_writing(run, monkeypatch):
  """A kill between the final evaluation and the write of its line."""
  as_killed_at(run, 4)

  def killed(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr("sao_jax.train.run.summarize", killed)
    with pytest.raises(KeyboardInterrupt):
      train(config_of(run))
  assert "policy/loss" in read_rows(run / "metrics.jsonl")[-1]
  train(config_of(run))
  last = read_rows(run / "metrics.jsonl")[-1]
  assert "policy/loss" in last
  assert "eval/sampled" in last


def test_evaluations_that_asked_something_else_are_not_compared(run):
  as_killed_at(run, 4)
  results = train(config_of(run, **{"evaluate.temperature": 0.0, "evaluate.greedy": False}))
  assert "sampled/gain" not in results
  load = Evaluation.load
  assert load(run, 0, "sampled").sampling["temperature"] == 1.0
  assert load(run, 4, "sampled").sampling["temperature"] == 0.0


def test_rl_goes_on_without_the_stages_before_it(run):
  as_killed_at(run, 4)
  shutil.rmtree(run / "sft")
  shutil.rmtree(run / "value")
  train(config_of(run, num_steps=5))
  assert steps_of(run) == [0, 1, 2, 3, 4, 5]
  assert not (run / "sft").exists()


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("incarnation", ""),
    ("incarnation", None),
    ("run.json", ""),
    ("run.json", "[]"),
    ("results.json", '{"problems": '),
    ("evaluations/step-000000.sampled.jsonl", ""),
  ],
)
def test_small_files_that_are_damaged_do_not_stop_a_run(run, name, content):
  as_killed_at(run, 4)
  path = run / name
  path.unlink(missing_ok=True)
  if content is not None:
    path.write_text(content)
  train(config_of(run, num_steps=5))
  assert int((run / "incarnation").read_text()) == 2
  assert steps_of(run) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_line_is_named_and_a_gap_is_said(run, capsys):
  as_killed_at(run, 4)
  path = run / "metrics.jsonl"
  lines = path.read_text().splitlines(keepends=True)
  path.write_text("".join([*lines[:2], "{nonsense\n", *lines[3:]]))
  with pytest.raises(RunFailed, match=r"metrics.jsonl, line 3: .*nonsense"):
    train(config_of(run, num_steps=5))
  path.write_text("".join(lines[:3]))
  train(config_of(run, num_steps=5))
  assert "ends at step 2, the checkpoint is of step 4" in capsys.readouterr().out


def test_damaged_rollouts_are_rolled_out_again(run, capsys):
  for name in ("checkpoints", "results.json", "value/checkpoints"):
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  data = (run / "value" / "rollouts.npz").read_bytes()
  (run / "value" / "rollouts.npz").write_bytes(data[: len(data) // 2])
  train(config_of(run))
  assert "rolling out again" in capsys.readouterr().out


def test_fresh_leaves_alone_what_is_no_run(tmp_path):
  (tmp_path / "home" / "thesis").mkdir(parents=True)
  with pytest.raises(ConfigError, match="puts an old run aside"):
    train(config_of(tmp_path / "home"), fresh=True)
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="file is a file"):
    train(config_of(tmp_path / "file"), fresh=True)
  assert (tmp_path / "home" / "thesis").is_dir()


def test_evaluate_and_export_take_what_they_say(run, tmp_path):
  with pytest.raises(ConfigError, match=r"evaluate.step = 3: .* steps \[2, 4\]"):
    evaluate(config_of(run, **{"evaluate.step": 3}))
  damage(run, 2)
  with pytest.raises(CheckpointError, match=r"checkpoint of step 2 in .* is damaged"):
    evaluate(config_of(run, **{"evaluate.step": 2}))
  assert (run / "checkpoints" / "2").is_dir()
  for path in (run / "checkpoints").iterdir():  # as before the first RL checkpoint
    shutil.rmtree(path) if path.is_dir() else path.unlink()
  with pytest.raises(ConfigError, match="has no checkpoint yet"):
    evaluate(config_of(run, **{"evaluate.step": 2}))
  evaluate(config_of(run))
  assert (run / "evaluate" / "evaluations" / "step-000000.json").exists()
  with pytest.raises(ConfigError, match="no such folder"):
    export(config_of(tmp_path / "typo"))
  assert not (tmp_path / "typo").exists()


def test_a_half_done_supervised_start_is_not_exported(tmp_path, monkeypatch):
  config = config_of(tmp_path / "run", **{"sft.steps": 40, "checkpoint.stage_every": 10})
  pack, count = supervised.pack, [0]

  def counted(*args, **kwargs):
    count[0] += 1
    if count[0] == 15:
      os.kill(os.getpid(), signal.SIGTERM)
    return pack(*args, **kwargs)

  monkeypatch.setattr(supervised, "pack", counted)
  with pytest.raises(Preempted):
    sft(config)
  with pytest.raises(ConfigError, match="not finished: run sao-jax sft"):
    export(config)


@pytest.mark.parametrize("path", ["model.rope_theta", "model.norm_eps", "model.experts_per_token"])
def test_weights_are_not_read_as_those_of_another_model(run, tmp_path, path):
  value = 2 if path.endswith("token") else 2.0
  for command in (evaluate, lambda config: export(config, out=str(tmp_path / "out"))):
    with pytest.raises(ConfigError, match=rf"mean something else:\n  {path}: .* in the checkpoint"):
      command(config_of(run, **{path: value}))
  assert not (tmp_path / "out").exists()
  evaluate(config_of(run, **{"model.moe_impl": "dense", "env.max_turns": 2}))  # how, and on what


def test_the_clock_goes_on(run):
  before = read_rows(run / "metrics.jsonl")[-1]["time/elapsed"]
  train(config_of(run, num_steps=STEPS + 1))
  elapsed = [row["time/elapsed"] for row in read_rows(run / "metrics.jsonl")]
  assert elapsed[-1] > before
  assert elapsed == sorted(elapsed)


def test_a_manifest_that_is_no_manifest_is_written_anew(run):
  as_killed_at(run, 2)
  manifest = run / "checkpoints" / "2.sha256"
  manifest.write_text("[]")
  train(config_of(run))
  assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == list(range(STEPS + 1))


def test_a_line_without_a_step_is_named(run):
  as_killed_at(run, 2)
  with (run / "metrics.jsonl").open("a") as file:
    file.write("{}\n")
  with pytest.raises(RunFailed, match=rf"metrics\.jsonl, line {STEPS + 2}: has no step"):
    train(config_of(run))


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(run, monkeypatch):
  monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
  for command in (train, evaluate):
    with pytest.raises(ConfigError, match="cannot be written to: change its permissions"):
      command(config_of(run))
