"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): clipped around a proximal policy, weighed
back to the one that sampled.  The proximal policy is a forward of the newest weights; without one:
--config.loss.prox=reuse (the training forward's own), ewma (averaged weights), snapshot (stored ones).
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "decoupled_ppo",
  "loss.name": "decoupled_ppo",
  "loss.prox": "recompute",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.2,
  "loss.max_behavior_weight": 5.0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
