"""The GRPO arm that SAO is compared with (arXiv 2607.07508): 16 prompts × 8 rollouts, no critic.

As configs/sao_math_qwen3_30b_a3b.py; clip-higher (0.2, 0.28) against the newest policy.

    sao-jax train --config=configs/grpo_math_qwen3_30b_a3b.py --dry-run
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "grpo_math_qwen3_30b_a3b",
  "group_size": 8,
  "advantage.name": "group",
  "loss.name": "ppo",
  "loss.prox": "recompute",
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "critic.enabled": False,
  "value_pretrain.rollouts": 0,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("sao_math_qwen3_30b_a3b.py")), CHANGES)
