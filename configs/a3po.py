"""A-3PO (arXiv 2512.06547): decoupled PPO whose proximal policy is interpolated by each token's staleness,
log π_prox = α log π_rollout + (1 − α) log π with α = 1/d, without any forward.  A fresh token has no trust
region (α = 0); as AReaL's code: --config.loss.alpha_at_zero=1
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "a3po",
  "loss.name": "a3po",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.2,
  "loss.max_behavior_weight": 5.0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
