"""GRPO's groups and advantages with SAO's DIS mask (an arm of arXiv 2607.07508)."""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "grpo_dis",
  "group_size": 8,
  "advantage.name": "group",
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
