"""Do two critic updates a batch explain more of the returns than one?

    sao-jax experiment configs/experiments/critic_updates.py

Explained variance is measured on a batch before the critic is updated on it.
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, last, mean

CONFIGS = Path(__file__).parent.parent


def get_experiment() -> Experiment:
  sao = CONFIGS / "sao.py"
  return Experiment(
    name="critic_updates",
    question="Explained variance of the value model with K updates a batch.",
    arms=(
      Arm("K=1", sao, {"critic.updates_per_step": 1}),
      Arm("K=2", sao, {"critic.updates_per_step": 2}),
      Arm("K=2 advantages after", sao, {"critic.advantages": "after"}),
      Arm("K=4", sao, {"critic.updates_per_step": 4}),
    ),
    columns={
      "explained variance": mean("critic/explained_variance"),
      "explained variance, last quarter": last("critic/explained_variance"),
      "held-out reward": final("eval/sampled"),
    },
    baseline="K=1",
    compared=("explained variance",),
    curves=("critic/explained_variance", "critic/loss", "episode/reward"),
    small=SMALL,
  )
