"""VAPO (arXiv 2504.05118): length-adaptive GAE, pretrained critic, clip-higher, and −log π on the
trajectories that succeeded, weight 0.1.  No DIS mask.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "vapo",
  "loss.name": "ppo",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "loss.positive_nll": 0.1,
  "critic.updates_per_step": 1,
  "critic.trainable": (),
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
