"""Every algorithm of the README's table runs on the quickstart's task, shortened."""

import pathlib
import re

import numpy as np
import pytest

from sao_jax import loader
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.run import train

CONFIGS = pathlib.Path("configs")
ROWS = sorted(p.stem for p in CONFIGS.glob("*.py") if "quickstart.py" in p.read_text())
SHORT = {
  "num_steps": 20,
  "batch_size": 16,
  "sft.steps": 120,
  "evaluate.problems": 16,
  "evaluate.greedy": False,
  "report.enabled": False,
  "rollout.slots": 16,
  "rollout.max_running": 32,
}


def test_the_readme_lists_all_of_them():
  table = pathlib.Path("README.md").read_text().partition("### Algorithms")[2].partition("###")[0]
  assert set(re.findall(r"^\| `(\w+)\.py`", table, re.MULTILINE)) == set(ROWS) - {"quickstart"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [row for row in ROWS if row != "quickstart"])
def test_twenty_steps(name, tmp_path):
  path = str(CONFIGS / f"{name}.py")
  changes = SHORT | {"run_dir": str(tmp_path / "run")}
  if loader.load(path).value_pretrain.rollouts:
    changes["value_pretrain.rollouts"] = 128
  config = loader.load(path, changes)
  train(config)
  rows = read_rows(tmp_path / "run" / "metrics.jsonl")[1:]
  assert [row["step"] for row in rows] == list(range(1, 21))
  losses = [row["policy/loss"] for row in rows]
  assert all(loss is not None and np.isfinite(loss) for loss in losses)
  assert sum(row["policy/skipped"] for row in rows) <= 2  # a batch of equal returns has no gradient
  assert any(row["policy/grad_norm"] > 0 for row in rows)
  assert max(row["staleness/trained_max"] for row in rows) <= config.rollout.max_staleness
  episodes = read_rows(tmp_path / "run" / "episodes.jsonl")
  serials = [e["serial"] for e in episodes]
  assert all(serials.count(s) == config.group_size for s in set(serials))
