"""What does freezing the critic's attention do to its gradients?

    sao-jax experiment configs/experiments/frozen_attention.py

The norm is of the parameters that are trained: freezing some can only lower it for equal weights, so
the reward and the explained variance beside it say what that buys.
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, largest, mean

CONFIGS = Path(__file__).parent.parent


def get_experiment() -> Experiment:
  sao = CONFIGS / "sao.py"
  return Experiment(
    name="frozen_attention",
    question="Norm of the critic's gradient by what is frozen.",
    arms=(
      Arm("nothing frozen", sao, {"critic.trainable": ()}),
      Arm("attention frozen", sao, {"critic.trainable": (r"^(?!.*attention)",)}),
      Arm("all but experts and head frozen", sao),
    ),
    columns={
      "gradient norm": mean("critic/grad_norm"),
      "largest gradient norm": largest("critic/grad_norm"),
      "explained variance": mean("critic/explained_variance"),
      "held-out reward": final("eval/sampled"),
    },
    baseline="nothing frozen",
    compared=("gradient norm",),
    curves=("critic/grad_norm", "critic/explained_variance", "episode/reward"),
    small=SMALL,
  )
