"""GRPO (arXiv 2402.03300) without asynchrony: every batch is sampled by the policy that it trains, and
the trainer waits for its last episode.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "sync_grpo",
  "group_size": 8,
  "advantage.name": "group",
  "loss.name": "ppo",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "rollout.max_staleness": 0,
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
