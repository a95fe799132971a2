"""Is a value of each token worth more than one of each turn?

sao-jax experiment configs/experiments/levels.py
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, last, mean

CONFIGS = Path(__file__).parent.parent


def get_experiment() -> Experiment:
  sao = CONFIGS / "sao.py"
  levels = ("token", "step_last", "step_mean")
  return Experiment(
    name="levels",
    question="Values and advantages of tokens, of a turn's last token, or of its mean.",
    arms=tuple(Arm(level, sao, {"advantage.level": level}) for level in levels),
    columns={
      "held-out reward": final("eval/sampled"),
      "training reward, last quarter": last("episode/reward"),
      "explained variance": mean("critic/explained_variance"),
      "mean size of an advantage": mean("advantage/abs"),
    },
    baseline="token",
    compared=("held-out reward", "explained variance"),
    curves=("episode/reward", "critic/explained_variance"),
    small=SMALL,
  )
