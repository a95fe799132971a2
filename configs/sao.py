"""SAO as the quickstart runs it (arXiv 2607.07508): one rollout a prompt, DIS mask, critic with K = 2
updates a batch and frozen attention, length-adaptive λ, value pretraining.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "sao",
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("quickstart.py")), CHANGES)
