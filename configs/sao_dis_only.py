"""SAO's single rollouts and DIS mask with a value model as PPO has it (ablation of arXiv 2607.07508):
one update a batch, every parameter trained, fixed λ, no value pretraining.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "sao_dis_only",
  "critic.updates_per_step": 1,
  "critic.trainable": (),
  "advantage.lambda_": 0.95,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
