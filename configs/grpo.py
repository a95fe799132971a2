"""GRPO (arXiv 2402.03300) with clip-higher (DAPO, arXiv 2503.14476): groups of 8 rollouts, no critic,
the ratio against the newest policy before the step.  A group is trained when its last member is done.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "grpo",
  "group_size": 8,
  "advantage.name": "group",
  "loss.name": "ppo",
  "loss.prox": "recompute",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
