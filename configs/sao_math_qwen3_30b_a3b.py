"""SAO on mathematics with a Python tool, with the article's numbers (arXiv 2607.07508).

Qwen3-30B-A3B after a supervised start on tool-integrated traces (configs/sft_tir_qwen3_30b_a3b.py);
128 prompts × 1 rollout, 50 turns in 128K tokens, DIS band (0.7, 6).

    sao-jax train --config=configs/sao_math_qwen3_30b_a3b.py --dry-run
    sao-jax train --config=configs/sao_math_qwen3_30b_a3b.py --config.weights.path=FOLDER \\
      --config.task.path=PROBLEMS.jsonl

The article does not say, and this file chooses: the staleness bound, the size of the corpus for value
pretraining, the number of steps, the limits of a tool call, and the mesh.  It was resolved and never
run: it needs a pod.
"""

from sao_jax import config as c
from sao_jax.models.presets import qwen3_30b_a3b

BUDGET = 131_072


def get_config() -> c.Config:
  return c.Config(
    name="sao_math_qwen3_30b_a3b",
    num_steps=400,
    batch_size=128,
    group_size=1,
    model=qwen3_30b_a3b(),
    weights=c.WeightsConfig(source="huggingface"),
    chat=c.ChatConfig(format="chatml"),
    task=c.TaskConfig(source="jsonl", path="problems.jsonl", eval_size=60),
    env=c.EnvConfig(
      tool=True,
      answer="boxed",
      grade="math",
      max_turns=50,
      max_tokens=BUDGET,
      max_turn_tokens=BUDGET,
      max_seconds=7200.0,
      max_observation=8000,
    ),
    sandbox=c.SandboxConfig(backend="bwrap", wall_seconds=30.0, cpu_seconds=30, concurrency=64),
    rollout=c.RolloutConfig(
      slots=128, max_len=BUDGET, max_running=256, max_staleness=1, await_seconds=1800.0
    ),
    loss=c.LossConfig(name="dis", eps_low=0.3, eps_high=5.0),
    advantage=c.AdvantageConfig(name="gae", alpha=1.5, gamma=1.0),
    policy=c.PolicyConfig(lr=1e-6, micro_batches=2),
    critic=c.CriticConfig(
      lr=5e-6, warmup_steps=10, updates_per_step=2, lambda_=1.0, micro_batches=2
    ),
    value_pretrain=c.ValuePretrainConfig(rollouts=2048, epochs=1, lr=5e-6),
    packing=c.PackingConfig(lengths=(16_384, 32_768, 65_536, BUDGET)),
    evaluate=c.EvaluateConfig(problems=60, samples=16, greedy=False, every=20),
    mesh=c.MeshConfig(fsdp=16, expert=4),
  )
