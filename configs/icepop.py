"""PPO whose tokens count only while π_train / π_rollout lies in [0.5, 5] (IcePop, arXiv 2510.18855), with
SAO's single rollouts and critic.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "icepop",
  "loss.name": "icepop",
  "loss.prox": "reuse",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "loss.min_behavior_weight": 0.5,
  "loss.max_behavior_weight": 5.0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
