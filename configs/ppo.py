"""PPO (arXiv 1707.06347) on single rollouts: clipped against the policy that sampled, GAE with λ = .95,
one update a batch of the whole critic.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "ppo",
  "loss.name": "ppo",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.2,
  "advantage.lambda_": 0.95,
  "critic.updates_per_step": 1,
  "critic.trainable": (),
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
