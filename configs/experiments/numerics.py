"""How much does an engine in bfloat16 disturb a trainer in float32?

    sao-jax experiment configs/experiments/numerics.py

Synchronous, so that every difference between rollout and training log-probs is numerical.
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, largest, mean

CONFIGS = Path(__file__).parent.parent


def get_experiment() -> Experiment:
  return Experiment(
    name="numerics",
    question="SAO and PPO at staleness 0, the engine in float32 or bfloat16.",
    arms=tuple(
      Arm(f"{name} {dtype}", CONFIGS / f"{name}.py", {"rollout.compute_dtype": dtype})
      for name in ("sao", "ppo")
      for dtype in ("float32", "bfloat16")
    ),
    columns={
      "mean gap of the ratio from 1": mean("ratio/mean_gap_fresh"),
      "largest gap": largest("ratio/max_gap_fresh"),
      "masked or clipped tokens": mean("loss/masked"),
      "held-out reward": final("eval/sampled"),
    },
    baseline="sao float32",
    compared=("held-out reward",),
    curves=("ratio/mean_gap_fresh", "loss/masked", "episode/reward"),
    changes={"rollout.max_staleness": 0},
    small=SMALL,
  )
