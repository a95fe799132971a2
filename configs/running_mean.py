"""Single rollouts, DIS mask, and for a baseline the mean of the last 8 returns of the same prompt (an
arm of arXiv 2607.07508), from earlier batches; of the run where a prompt is new.  The mean of the last
128 of all: --config.advantage.window_per=run --config.advantage.window=128
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "running_mean",
  "advantage.name": "running_mean",
  "advantage.window": 8,
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
