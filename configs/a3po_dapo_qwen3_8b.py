"""A-3PO on DAPO-Math-17k with Qwen3-8B (arXiv 2512.06547).

As configs/a3po_gsm8k_qwen25_1_5b.py, with the larger model and long answers.  What the article does
not say of this run is DAPO's (arXiv 2503.14476): learning rate 1e-6, clip-higher (0.2, 0.28),
20,480 new tokens, 16 rollouts a prompt.

    sao-jax train --config=configs/a3po_dapo_qwen3_8b.py --dry-run
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load
from sao_jax.models.presets import qwen3_8b

CHANGES = {
  "name": "a3po_dapo_qwen3_8b",
  "group_size": 16,
  "task.path": "dapo_math_17k.jsonl",
  "env.max_tokens": 22_528,
  "env.max_turn_tokens": 20_480,
  "env.max_seconds": 3600.0,
  "rollout.max_len": 22_528,
  "packing.lengths": (4096, 8192, 22_528),
  "loss.eps_low": 0.2,
  "loss.eps_high": 0.28,
  "policy.lr": 1e-6,
  "policy.weight_decay": 0.1,
  "policy.warmup_steps": 20,
  "policy.micro_batches": 64,
  "mesh.fsdp": 16,
}


def get_config() -> Config:
  config = load(str(Path(__file__).with_name("a3po_gsm8k_qwen25_1_5b.py")), CHANGES)
  config.model = qwen3_8b()
  return config
