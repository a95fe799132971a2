"""Metrics: one line per step, read late; bar, phases, tables; the figure shows what there is."""

import io
import json
import struct
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from sao_jax.config import ConfigError
from sao_jax.train import metrics as m
from sao_jax.train.curves import draw
from sao_jax.train.progress import ProgressBar, phase, summary


@pytest.fixture
def console() -> Console:
  return Console(file=io.StringIO(), width=100, force_terminal=False)


def printed(console: Console) -> str:
  return console.file.getvalue()


def rows(run_dir) -> list[dict]:
  text = (run_dir / "metrics.jsonl").read_text()
  return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_each_step_once_with_all_its_metrics(tmp_path, console):
  with m.Writer(tmp_path, console=console) as writer:
    writer.write(0, {"eval/sampled": 0.25})
    for step in (1, 2):
      writer.hold(step, {"policy/loss": jnp.float32(step), "staleness/histogram": jnp.arange(3)})
    writer.write(2, {"eval/sampled": 0.5})
  got = rows(tmp_path)
  assert [row["step"] for row in got] == [0, 1, 2]
  assert got[0]["eval/sampled"] == 0.25
  assert got[1]["policy/loss"] == 1.0
  assert got[2]["staleness/histogram"] == [0, 1, 2]
  assert got[2]["eval/sampled"] == 0.5


def test_step_is_read_only_when_the_next_begins(tmp_path, console, monkeypatch):
  reads = []
  real = jax.device_get
  monkeypatch.setattr(m.jax, "device_get", lambda tree: reads.append(dict(tree)) or real(tree))
  with m.Writer(tmp_path, console=console) as writer:
    writer.hold(1, {"a": jnp.float32(1)})
    assert reads == []
    assert writer.last == {}
    writer.hold(2, {"a": jnp.float32(2)})
    assert [r["a"] for r in reads] == [1.0]
    assert writer.last["step"] == 1
    assert rows(tmp_path)[-1]["step"] == 1  # on the disk at once: a kill loses one step at most
  assert [row["a"] for row in rows(tmp_path)] == [1.0, 2.0]


def test_written_or_past_steps_are_refused(tmp_path, console):
  with m.Writer(tmp_path, console=console) as writer:
    writer.hold(3, {})
    with pytest.raises(ValueError, match="step 2, but step 3 has begun"):
      writer.hold(2, {})
    writer.flush()
    with pytest.raises(ValueError, match="step 2, but step 3 is already written"):
      writer.hold(2, {})


def test_the_last_line_can_be_added_to_also_after_a_resume(tmp_path, console):
  with m.Writer(tmp_path, console=console) as writer:
    writer.hold(1, {"a": 1})
    writer.hold(2, {"a": 2})
    writer.sync()
    writer.hold(2, {"eval/sampled": 0.5})
    writer.flush()
    assert [row["a"] for row in rows(tmp_path)] == [1, 2]
  with m.Writer(tmp_path, resume_step=2, console=console) as writer:
    writer.hold(2, {"eval/greedy": 0.7})
    writer.hold(3, {"a": 3})
  assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
  assert rows(tmp_path)[1]["eval/sampled"] == 0.5
  assert rows(tmp_path)[1]["eval/greedy"] == 0.7


def test_what_is_not_finite_becomes_null(tmp_path, console):
  with m.Writer(tmp_path, console=console) as writer:
    writer.hold(1, {"nan": jnp.nan, "inf": np.float32(np.inf), "list": [1.0, np.nan], "name": "x"})
  row = rows(tmp_path)[0]
  assert row["nan"] is None
  assert row["inf"] is None
  assert row["list"] == [1.0, None]
  assert row["name"] == "x"


def test_resume_takes_back_later_steps_and_a_torn_line(tmp_path, console):
  with m.Writer(tmp_path, console=console) as writer:
    for step in range(1, 6):
      writer.hold(step, {"a": step})
  path = tmp_path / "metrics.jsonl"
  path.write_text(path.read_text() + '{"step": 6, "a"')
  with m.Writer(tmp_path, resume_step=3, console=console) as writer:
    assert writer.last["step"] == 3
    writer.hold(4, {"a": 40})
  assert [(row["step"], row["a"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
  elapsed = [row["time/elapsed"] for row in rows(tmp_path)]
  assert elapsed == sorted(elapsed)


def test_new_run_in_the_same_folder_keeps_the_previous(tmp_path, console):
  for value in (1, 2):
    with m.Writer(tmp_path, console=console) as writer:
      writer.hold(1, {"a": value})
  assert rows(tmp_path)[0]["a"] == 2
  assert m.read_rows(tmp_path / "metrics.previous.jsonl")[0]["a"] == 1


def test_lines_survive_an_exception(tmp_path, console):
  def crash() -> None:
    with m.Writer(tmp_path, console=console) as writer:
      writer.hold(1, {"a": 1})
      raise RuntimeError

  with pytest.raises(RuntimeError):
    crash()
  assert [row["a"] for row in rows(tmp_path)] == [1]


def test_tensorboard_gets_the_scalars(tmp_path, console):
  pytest.importorskip("tensorboardX")
  with m.Writer(tmp_path, tensorboard=True, console=console) as writer:
    writer.hold(1, {"episode/reward": 0.5, "staleness/histogram": [1, 2]})
  (events,) = (tmp_path / "tensorboard").iterdir()
  data = events.read_bytes()
  assert b"episode/reward" in data
  assert b"staleness/histogram" not in data
  assert struct.pack("<f", 0.5) in data


def test_tensorboard_without_its_package_says_what_to_do(tmp_path, console, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
  with pytest.raises(ConfigError, match=r"sao-jax\[tensorboard\]"):
    m.Writer(tmp_path, tensorboard=True, console=console)


def test_phase_announces_beats_and_reports_failure(console):
  with phase("compiling", console, heartbeat=0.05):
    time.sleep(0.2)
  text = printed(console)
  assert text.startswith("compiling …\n")
  assert "still compiling" in text
  assert "compiling: done in" in text
  with pytest.raises(KeyError), phase("loading", console):
    raise KeyError
  assert "loading: failed after" in printed(console)
  assert not [t for t in threading.enumerate() if t.name == "phase-heartbeat"]


def test_summary_shows_what_there_is():
  metrics = {"episode/reward": 0.5, "staleness/mean": np.float32(1), "loss/masked": 0.021}
  assert summary(metrics) == "reward 0.50  staleness 1.00  masked 2.1%"
  assert summary({"sft/loss": jnp.float32(2)}) == "loss 2.000"
  assert summary({}) == ""


def test_plain_bar_prints_first_second_lines_and_the_end(console, monkeypatch):
  monkeypatch.setattr("sao_jax.train.progress.LINE_SECONDS", 0.0)
  with ProgressBar("sft", 3, console) as bar:
    for step in (1, 2, 3):
      bar.update(step, {"sft/loss": jnp.float32(step)})
    bar.waiting({"running": 2, "queued": 0, "failed/EnvFailure": 1})
  lines = printed(console).splitlines()
  assert lines[0] == "sft 1/3"  # its numbers may still be computed, and nothing is known of speed
  assert lines[1] == "sft 2/3  loss 1.000  ETA 0:00"
  assert lines[2] == "sft 3/3  loss 3.000"
  assert lines[3] == "sft: waiting for episodes; so far 2 running"


def test_terminal_bar_redraws():
  console = Console(file=io.StringIO(), width=120, force_terminal=True)
  with ProgressBar("sao", 2, console) as bar:
    bar.update(1, {"episode/reward": 0.25})
    bar.update(2, {"episode/reward": 0.75})
  text = printed(console)
  assert "2/2" in text
  assert "reward 0.75" in text


def history(n: int = 40) -> list[dict]:
  rng = np.random.default_rng(0)
  out: list[dict] = [{"step": 0, "eval/sampled": 0.3, "eval/greedy": 0.9}]
  for step in range(1, n + 1):
    out.append(
      {
        "step": step,
        "time/elapsed": float(step),
        "episode/reward": 0.3 + 0.01 * step + 0.05 * rng.normal(),
        "episode/actions": 20.0,
        "episode/calls": 0.5,
        "staleness/mean": 0.7,
        "staleness/trained_max": 2.0,
        "staleness/mixed_versions": 0.4,
        "staleness/histogram": rng.multinomial(100, [0.5, 0.3, 0.2]).tolist(),
        "staleness/masked_share": 0.001,
        "loss/masked": 0.02,
        "loss/masked_low": 0.015,
        "loss/masked_high": 0.005,
        "critic/explained_variance": 0.2,
        "throughput/tokens_per_second": 1000.0,
        "time/trainer_busy": 0.6,
        "time/engine_busy": 0.8,
        "accounting/started": 64.0 * step,
        "accounting/trained": 60.0 * step,
      }
    )
  return out


def test_tables_have_the_numbers(tmp_path, console):
  results = {
    "problems": 256.0,
    "sampled/before": 0.3,
    "sampled/after": 0.7,
    "sampled/gain": 0.4,
    "sampled/gain_low": 0.33,
    "sampled/gain_high": 0.47,
  }
  with m.Writer(tmp_path / "demo", console=console) as writer:
    for row in history():
      writer.hold(row["step"], {k: v for k, v in row.items() if k != "step"})
    path = writer.finish(results)
  text = printed(console)
  assert "Held-out reward on 256 problems" in text
  for cell in ("0.300", "0.700", "+0.400", "+0.330 … +0.470", "40.0%", "2,400", "1,000"):
    assert cell in text, cell
  assert path == tmp_path / "demo" / "curves.png"
  assert str(path) in text.splitlines()[-1]
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "drawn",
  [
    [],
    [{"step": 0, "eval/sampled": 0.5}],
    [{"step": 1, "episode/reward": None, "staleness/histogram": [5]}],
    [{"step": s, "staleness/mean": 1.0, "staleness/max": 2.0} for s in range(3)],
    [{"step": s, "staleness/histogram": [1] * 12} for s in range(1, 20)],
    [{"step": s, "episode/reward": -5.0 * s} for s in range(30)],
  ],
)
def test_figure_of_whatever_was_recorded(drawn, tmp_path):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    draw(drawn, tmp_path / "curves.png", title="run")
  width, height = struct.unpack(">II", (tmp_path / "curves.png").read_bytes()[16:24])
  assert width > 1500
  assert height > 800
