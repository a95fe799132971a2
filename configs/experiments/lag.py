"""Does the two-sided mask keep learning from data that is 16 versions old?

    sao-jax experiment configs/experiments/lag.py

GRPO, VAPO, GRPO with the DIS mask and SAO, each at a forced staleness of 0, 4 and 16: a batch is
trained when as many wait behind it (rollout.min_staleness).  The first d steps are the way there: what
is trained at step k < d was sampled k versions ago.
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, last, mean

CONFIGS = Path(__file__).parent.parent

ARMS = ("grpo", "vapo", "grpo_dis", "sao")
LAGS = (0, 4, 16)


def get_experiment() -> Experiment:
  return Experiment(
    name="lag",
    question="Held-out reward after training on data of a forced staleness d, in versions.",
    arms=tuple(
      Arm(
        f"{name} d={lag}",
        CONFIGS / f"{name}.py",
        {"rollout.max_staleness": lag, "rollout.min_staleness": lag},
      )
      for name in ARMS
      for lag in LAGS
    ),
    columns={
      "held-out reward": final("eval/sampled"),
      "training reward, last quarter": last("episode/reward"),
      "masked or clipped tokens": mean("loss/masked"),
      "staleness, last quarter": last("staleness/mean"),
      "entropy, last quarter": last("policy/entropy"),
    },
    baseline="sao d=0",
    compared=("held-out reward",),
    curves=("episode/reward", "loss/masked", "policy/entropy", "ratio/kl"),
    changes={"num_steps": 80},
    small=SMALL,
  )
