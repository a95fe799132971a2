"""SAO on software engineering, with the article's numbers (arXiv 2607.07508).

As configs/sao_math_qwen3_30b_a3b.py, with 300 turns in 128K tokens and the DIS band of coding,
(0.2, 4).  The environment, env.name = "coding", is not written yet: this file resolves (--dry-run),
and a run is refused.

    sao-jax train --config=configs/sao_swe_qwen3_30b_a3b.py --dry-run
"""

from pathlib import Path

from sao_jax.config import Config
from sao_jax.loader import load

CHANGES = {
  "name": "sao_swe_qwen3_30b_a3b",
  "env.name": "coding",
  "env.max_turns": 300,
  "task.path": "repositories.jsonl",
  "loss.eps_low": 0.8,
  "loss.eps_high": 3.0,
  "evaluate.samples": 4,
}


def get_config() -> Config:
  return load(str(Path(__file__).with_name("sao_math_qwen3_30b_a3b.py")), CHANGES)
