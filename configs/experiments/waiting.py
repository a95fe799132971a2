"""What does waiting for the slowest rollout cost?

    sao-jax experiment configs/experiments/waiting.py

An untrained policy ends its reply at random, so lengths are geometric: the longest of 64 is some five
times the mean.  Nothing is learned (the learning rate is 1e-9), so every arm has the same work.  Run
it with nothing else on the machine: it measures time.
"""

from pathlib import Path

from sao_jax.train.experiment import Arm, Experiment
from sao_jax.train.tables import mean, per_second

CONFIGS = Path(__file__).parent.parent

WORK = {
  "num_steps": 40,
  "sft.steps": 0,
  "value_pretrain.rollouts": 0,
  "critic.enabled": False,
  "advantage.name": "batch_mean",
  "policy.lr": 1e-9,
  "env.tool": False,
  "env.max_turns": 1,
  "env.max_tokens": 384,
  "env.max_turn_tokens": 360,
  "rollout.max_len": 384,
  "packing.lengths": (384,),
  "evaluate.problems": 8,
  "evaluate.greedy": False,
}


def get_experiment() -> Experiment:
  sao = CONFIGS / "sao.py"
  return Experiment(
    name="waiting",
    question="Throughput and idle engine slots by what a training step waits for.",
    arms=(
      Arm("sync", sao, {"rollout.max_staleness": 0}),
      Arm("group-8", sao, {"group_size": 8, "advantage.name": "group"}),
      Arm("single", sao),
    ),
    columns={
      "sampled tokens a second": per_second("batch/action_tokens"),
      "used slots": mean("engine/slot_use"),
      "engine busy": mean("time/engine_busy"),
      "trainer busy": mean("time/trainer_busy"),
      "seconds from finish to training": mean("queue/wait_mean"),
      "staleness": mean("staleness/mean"),
      "tokens of a reply": mean("episode/actions"),
    },
    baseline="sync",
    compared=("sampled tokens a second",),
    curves=("engine/slot_use", "throughput/tokens_per_second"),
    learns=False,
    changes=WORK,
    small={"num_steps": 4, "batch_size": 16},
  )
