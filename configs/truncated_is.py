"""Truncated importance sampling: policy gradient with min(π/π_rollout, 2) (Ionides 2008), which is CISPO
without a lower edge; with SAO's single rollouts and critic.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "truncated_is",
  "loss.name": "cispo",
  "loss.eps_low": 1.0,
  "loss.eps_high": 1.0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
