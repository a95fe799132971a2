"""Online writing, shortened: the wish changes in the middle of a run, and the next weights hear of it."""

import dataclasses
import pathlib

import numpy as np
import pytest

from sao_jax import loader
from sao_jax.config import ConfigError, EnvConfig, RolloutConfig, TaskConfig
from sao_jax.data.chat import make_chat
from sao_jax.data.tasks import make_source, task_stream
from sao_jax.envs.make import make_env
from sao_jax.rollout.queue import TrajectoryQueue
from sao_jax.rollout.workers import Workers
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.run import check_lengths, train
from sao_jax.types import Version
from tests.rollout.scripted import says

CONFIGS = pathlib.Path("configs")
NAMES = ("online_writing", "online_writing_running_mean_8", "online_writing_running_mean_128")
SHORT = {
  "num_steps": 12,
  "batch_size": 16,
  "task.phase_length": 96,  # of 6 steps
  "sft.steps": 60,
  "evaluate.problems": 8,
  "evaluate.samples": 2,
  "evaluate.greedy": False,
  "report.enabled": False,
  "rollout.slots": 16,
  "rollout.max_running": 32,
}


def short(name, folder, **changes):
  path = str(CONFIGS / f"{name}.py")
  changes = SHORT | {"run_dir": str(folder)} | changes
  if loader.load(path).critic.enabled:
    changes |= {"value_pretrain.rollouts": 80}
  return loader.load(path, changes)


def test_the_baselines_differ_from_sao_in_the_advantage_only():
  sao, *others = (dict(loader.leaves(loader.load(str(CONFIGS / f"{name}.py")))) for name in NAMES)
  assert sao["rollout.max_staleness"] == 2
  assert sao["group_size"] == 1
  for other, (window, per) in zip(others, ((8, "prompt"), (128, "run")), strict=True):
    assert (other["advantage.window"], other["advantage.window_per"]) == (window, per)
    changed = {path for path, value in sao.items() if other[path] != value}
    assert changed <= {
      *("name", "advantage.name", "advantage.window", "advantage.window_per"),
      *("critic.enabled", "value_pretrain.rollouts"),
    }


def test_everything_that_is_written_fits():
  config = loader.load(str(CONFIGS / "online_writing.py"))
  check_lengths(config, make_chat(config.chat), samples=500)


def test_resumed_workers_ask_for_the_style_of_each_serial():
  """Serials that were pending when a run was saved keep their phase, whatever was started since."""
  task = TaskConfig(source="writing", phase_length=10, eval_size=32)
  env = EnvConfig(name="online_writing", tool=False, max_turns=1)
  config = dataclasses.replace(
    loader.load(str(CONFIGS / "online_writing.py")),
    batch_size=4,
    rollout=RolloutConfig(max_running=8, await_seconds=20.0, max_staleness=1),
  )
  config.critic.enabled = False
  chat = make_chat(config.chat)
  queue = TrajectoryQueue(4, 1, "mask", 1)
  workers = Workers(
    config,
    says("tiny tea by soft rain."),
    task_stream(make_source(task), 0),
    make_env(env),
    chat,
    queue,
    lambda: Version(0, 0),
    resume={"next_serial": 18, "pending": [3, 11, 9]},
  )
  phases = {}
  with workers:
    for step in range(3):
      for episode in queue.get(4, Version(0, step), timeout=30):
        phases[episode.task_serial] = episode.metrics["phase"]
        assert episode.metrics["style_cute"] == 1.0
        assert episode.metrics["style_hit"] == float(episode.task_serial < 10)
      queue.release()
  assert {3, 9, 11, 18, 19, 20} <= set(phases)
  assert phases == {serial: min(serial // 10, 2) for serial in phases}


def test_a_judge_that_is_not_there_stops_the_run_before_any_work(tmp_path):
  config = short("online_writing", tmp_path / "run", **{"env.judge": "no_such_judge:make"})
  with pytest.raises(ConfigError, match="importing no_such_judge raised ModuleNotFoundError"):
    train(config)
  assert not (tmp_path / "run" / "sft").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_twelve_steps_over_a_switch(name, tmp_path):
  config = short(name, tmp_path / "run")
  train(config)
  rows = read_rows(tmp_path / "run" / "metrics.jsonl")[1:]
  assert [row["step"] for row in rows] == list(range(1, 13))
  assert all(np.isfinite(row["policy/loss"]) for row in rows)
  assert any(row["policy/grad_norm"] > 0 for row in rows)
  # Episodes in flight blur the switch by the staleness bound, no more.
  phases = [row["episode/phase"] for row in rows]
  assert phases[:3] == [0.0] * 3
  assert phases[9:] == [1.0] * 3
  for row in rows:
    styles = ("cute", "chuunibyou", "classical", "academic")
    assert 0 <= sum(row[f"episode/style_{style}"] for style in styles) <= 1
    assert row["episode/reward"] <= min(row["episode/quality"], row["episode/style_hit"])
    assert row["staleness/trained_max"] <= 2
  episodes = read_rows(tmp_path / "run" / "episodes.jsonl")
  assert len({e["serial"] for e in episodes}) == len(episodes) == 12 * 16


@pytest.mark.slow
def test_another_judge_trains(tmp_path):
  changes = {"env.judge": "tests.envs.judges:lengths", "num_steps": 2, "sft.steps": 10}
  train(short("online_writing", tmp_path / "run", **changes))
  rows = read_rows(tmp_path / "run" / "metrics.jsonl")[1:]
  assert all(row["episode/style_hit"] == 0.5 for row in rows)
  assert all(0 < row["episode/reward"] <= 0.5 for row in rows)
  assert "episode/style_cute" not in rows[0]
