"""A run of seconds with every stage, for tests that kill it; reward is neither 0 nor 1."""

from sao_jax import config as c


def get_config() -> c.Config:
  return c.Config(
    name="tiny",
    num_steps=20,
    batch_size=8,
    model=c.ModelConfig(
      vocab_size=64,
      d_model=32,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=16,
      d_ff=32,
      num_experts=2,
      experts_per_token=1,
    ),
    task=c.TaskConfig(difficulty=2, digits=1, eval_size=8),
    env=c.EnvConfig(max_turns=3, max_tokens=48, max_turn_tokens=12, max_observation=4),
    sandbox=c.SandboxConfig(backend="expr"),
    rollout=c.RolloutConfig(slots=8, max_len=48, max_running=12, max_staleness=0),
    policy=c.PolicyConfig(lr=1e-3),
    critic=c.CriticConfig(lr=1e-3, warmup_steps=0),
    packing=c.PackingConfig(lengths=(48,), max_segments=1),
    sft=c.SftConfig(steps=120, batch_size=16, lr=1e-2, good_fraction=1.0),
    value_pretrain=c.ValuePretrainConfig(rollouts=64, epochs=4, batch_size=8),
    evaluate=c.EvaluateConfig(problems=8),
    checkpoint=c.CheckpointConfig(every=5, stage_every=10, keep=100),
    report=c.ReportConfig(trajectories_every=5, trajectories=2),
  )
