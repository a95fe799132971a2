"""CISPO (arXiv 2506.13585): the importance weight is clipped, and no token loses its gradient; with SAO's
single rollouts and critic.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "cispo",
  "loss.name": "cispo",
  "loss.eps_low": 1.0,
  "loss.eps_high": 4.0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
