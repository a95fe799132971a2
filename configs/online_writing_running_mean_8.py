"""online_writing.py without a critic: the baseline is the mean of the prompt's last 8 returns, from
earlier batches and whatever style was wanted then; of the run's last 8 where a prompt is new (an arm of
arXiv 2607.07508).
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "online_writing_running_mean_8",
  "advantage.name": "running_mean",
  "advantage.window": 8,
  "advantage.window_per": "prompt",
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("online_writing.py")), CHANGES)
