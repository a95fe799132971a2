"""Single-rollout asynchronous SAO on tool arithmetic, from nothing to a reward curve, on a CPU.

A small MoE learns from traces of which 45 % are good and the rest lazy or wrong, so that it can call
the Python tool but often does not.  SAO then teaches it to: one rollout per prompt, DIS mask, a value
model with frozen attention (arXiv 2607.07508).

    sao-jax train --config=configs/quickstart.py

Harder problems, with room for their words (minutes more, and a lower start)::

    sao-jax train --config=configs/quickstart.py --config.task.kind=word_problem \\
      --config.env.max_tokens=192 --config.rollout.max_len=192 "--config.packing.lengths=(192,)"
"""

from sao_jax import config as c


def get_config() -> c.Config:
  return c.Config(
    name="quickstart",
    num_steps=60,
    batch_size=64,
    model=c.ModelConfig(
      vocab_size=64,
      d_model=64,
      num_layers=2,
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      d_ff=128,
      num_experts=4,
      experts_per_token=2,
    ),
    chat=c.ChatConfig(format="char"),
    task=c.TaskConfig(kind="expression", difficulty=3, digits=2, eval_size=256),
    env=c.EnvConfig(max_turns=3, max_tokens=48, max_turn_tokens=24, max_observation=12),
    rollout=c.RolloutConfig(slots=32, max_len=48, max_running=64, max_staleness=2),
    sandbox=c.SandboxConfig(backend="expr"),  # arithmetic only; a bwrap call costs 60 ms of CPU
    loss=c.LossConfig(name="dis", eps_low=0.3, eps_high=5.0),
    policy=c.PolicyConfig(lr=3e-4, warmup_steps=5),
    critic=c.CriticConfig(lr=1e-3, warmup_steps=0),
    packing=c.PackingConfig(lengths=(48,), max_segments=1),
    sft=c.SftConfig(steps=280, batch_size=64),
    value_pretrain=c.ValuePretrainConfig(rollouts=1024, epochs=4),
    evaluate=c.EvaluateConfig(problems=256),
  )
