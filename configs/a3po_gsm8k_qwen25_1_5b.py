"""A-3PO on GSM8K with Qwen2.5-1.5B-Instruct (arXiv 2512.06547; AReaL's example prox_approx).

256 prompts × 4 rollouts, ε 0.4, reward (r − 0.5)·10, advantages normalised over the batch, behaviour
weight at most 5, AdamW 1.7e-5 with weight decay 0.017, 1,024 new tokens, one minibatch.

    sao-jax train --config=configs/a3po_gsm8k_qwen25_1_5b.py --dry-run
    sao-jax train --config=configs/a3po_gsm8k_qwen25_1_5b.py --config.weights.path=FOLDER \\
      --config.task.path=GSM8K.jsonl

AReaL norms rewards by group and then advantages by batch; so does this file.  It was resolved and
never run: it needs an accelerator.
"""

from sao_jax import config as c
from sao_jax.models.presets import qwen2_5_1_5b


def get_config() -> c.Config:
  return c.Config(
    name="a3po_gsm8k_qwen25_1_5b",
    num_steps=300,
    batch_size=1024,
    group_size=4,
    model=qwen2_5_1_5b(),
    weights=c.WeightsConfig(source="huggingface"),
    chat=c.ChatConfig(format="chatml"),
    task=c.TaskConfig(source="jsonl", path="gsm8k.jsonl"),
    env=c.EnvConfig(
      tool=False,
      answer="boxed",
      grade="math",
      max_turns=1,
      max_tokens=2048,
      max_turn_tokens=1024,
      max_seconds=600.0,
    ),
    rollout=c.RolloutConfig(
      slots=256, max_len=2048, max_running=256, max_staleness=2, await_seconds=600.0
    ),
    loss=c.LossConfig(name="a3po", eps_low=0.4, eps_high=0.4, max_behavior_weight=5.0),
    advantage=c.AdvantageConfig(
      name="group", group_scale="std", normalize="batch", reward_scale=10.0, reward_bias=-0.5
    ),
    policy=c.PolicyConfig(lr=1.7e-5, weight_decay=0.017, b2=0.999, minibatches=1, micro_batches=16),
    critic=c.CriticConfig(enabled=False),
    packing=c.PackingConfig(lengths=(512, 1024, 2048)),
    mesh=c.MeshConfig(fsdp=8),
  )
