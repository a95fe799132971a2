"""REINFORCE with the batch's mean return as baseline: single rollouts, DIS mask, no critic."""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "batch_mean",
  "advantage.name": "batch_mean",
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
