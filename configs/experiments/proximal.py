"""What does A-3PO's interpolation save, and what does it cost?

    sao-jax experiment configs/experiments/proximal.py

Decoupled PPO with a proximal policy that is interpolated, recomputed, or the training forward's own,
and PPO without any asynchrony.  Run it with nothing else on the machine: it measures time.
"""

from pathlib import Path

from sao_jax.train.experiment import SMALL, Arm, Experiment
from sao_jax.train.tables import final, largest, mean, median

CONFIGS = Path(__file__).parent.parent


def get_experiment() -> Experiment:
  decoupled = CONFIGS / "decoupled_ppo.py"
  return Experiment(
    name="proximal",
    question="Decoupled PPO by the source of its proximal policy, and synchronous PPO.",
    arms=(
      Arm("recompute", decoupled),
      Arm("a3po", CONFIGS / "a3po.py"),
      Arm("reuse", decoupled, {"loss.prox": "reuse"}),
      Arm("sync", CONFIGS / "ppo.py", {"rollout.max_staleness": 0}),
    ),
    columns={
      "seconds a step": median("time/step"),
      "seconds of the proximal forward": median("time/prox", missing=0.0),
      "largest behaviour weight": largest("ratio/behavior_max", missing=1.0),
      "clipped tokens": mean("loss/masked"),
      "held-out reward": final("eval/sampled"),
    },
    baseline="recompute",
    compared=("held-out reward", "seconds a step"),
    curves=("episode/reward", "loss/masked", "time/step"),
    small=SMALL,
  )
