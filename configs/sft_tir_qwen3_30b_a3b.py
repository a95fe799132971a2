"""The supervised start of SAO's models: three epochs of tool-integrated traces (arXiv 2607.07508).

    sao-jax sft --config=configs/sft_tir_qwen3_30b_a3b.py --dry-run
    sao-jax sft --config=configs/sft_tir_qwen3_30b_a3b.py --config.weights.path=FOLDER \\
      --config.sft.path=TRACES.jsonl --config.task.path=PROBLEMS.jsonl

The article says neither learning rate nor batch: those here are usual ones for such a model.
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "sft_tir_qwen3_30b_a3b",
  "sft.path": "traces.jsonl",
  "sft.epochs": 3,
  "sft.lr": 1e-5,
  "sft.warmup_steps": 50,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("sao_math_qwen3_30b_a3b.py")), CHANGES)
