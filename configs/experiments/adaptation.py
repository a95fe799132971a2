"""How soon is a change of what is wanted learned, with a critic and with running means?

    sao-jax experiment configs/experiments/adaptation.py

The wanted style changes twice.  A phase is recovered from at the first step whose mean reward over five
steps is half of what the phase before ended with; a run that never gets there counts its whole phase.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import REWARD, mean, series

CONFIGS = Path(__file__).parent.parent
PHASES = 3
Measure = Callable[[Sequence[Mapping[str, Any]]], float]


def reward_in(phase: int) -> Measure:
  """Mean reward of a phase, counted from 0."""
  return lambda rows: float(np.array_split(series(rows, REWARD), PHASES)[phase].mean())


def steps_to_recover(phase: int) -> Measure:
  def measure(rows: Sequence[Mapping[str, Any]]) -> float:
    phases = np.array_split(series(rows, REWARD), PHASES)
    before, now = phases[phase - 1], phases[phase]
    level = before[-max(1, len(before) // 4) :].mean() / 2
    window = min(5, len(now))
    means = np.convolve(now, np.ones(window) / window, "valid")
    reached = np.flatnonzero(means >= level)
    return float(reached[0] + window if len(reached) else len(now))

  return measure


def get_experiment() -> Experiment:
  return Experiment(
    name="adaptation",
    question="Steps until reward recovers after each change of the wanted style (45 steps a phase).",
    arms=(
      Arm("mean-128", CONFIGS / "online_writing_running_mean_128.py"),
      Arm("mean-8", CONFIGS / "online_writing_running_mean_8.py"),
      Arm("sao", CONFIGS / "online_writing.py"),
    ),
    columns={
      "reward": mean(REWARD),
      **{f"reward in phase {i + 1}": reward_in(i) for i in range(PHASES)},
      **{f"steps to recover in phase {i + 1}": steps_to_recover(i) for i in range(1, PHASES)},
    },
    baseline="mean-128",
    compared=(
      "reward in phase 2",
      "reward in phase 3",
      "steps to recover in phase 2",
      "steps to recover in phase 3",
    ),
    curves=(
      REWARD,
      "episode/style_cute",
      "episode/style_chuunibyou",
      "episode/style_classical",
    ),
    changes={"num_steps": PHASES * 45},  # of the config's phases
    small={
      **{path: x for path, x in SMALL.items() if not path.startswith("task.")},
      "num_steps": 6,
      "task.phase_length": 32,
      "value_pretrain.rollouts": 32,
      "evaluate.samples": 1,
    },
  )
