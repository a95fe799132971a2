"""online_writing.py without a critic: the baseline is the mean of the run's last 128 returns, from
earlier batches (an arm of arXiv 2607.07508).
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "online_writing_running_mean_128",
  "advantage.name": "running_mean",
  "advantage.window": 128,
  "advantage.window_per": "run",
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("online_writing.py")), CHANGES)
