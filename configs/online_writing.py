"""SAO while the wanted style changes: cute, then chuunibyou, then classical.

A small MoE learns from traces to write on two topics in any style, most often an academic one, not
always well.  No prompt tells which style is wanted: reward = quality × style in {0, 1} does.  One
rollout per prompt, critic, staleness up to 2 (arXiv 2607.07508).  Under 5 minutes on two shared cores.

    sao-jax train --config=configs/online_writing.py

Tuned on SAO's seed 0, twelve tries, and then used as it is by the running means.  Six tries stayed at
the first style for good: with a policy.lr of 3e-4 to 1e-3, a critic.lr of 1e-3 to 2e-3, 78 % to 93 % of
the texts in that style at the switch, and in three of them a rule that wanted two words of a style;
which of these matters was not taken apart.

Training reward, mean of five steps (from steps 3 to 7 of a style to its last five), and steps from a
switch until that mean is .5 (–: not within the phase).  The last 15 steps were added, to all five runs,
after three of them were below .5 at step 135.  One run each: no ranking of the baselines.

  ====================  ====  =============  =============  =============  ============
  run                   seed  cute           chuunibyou     classical      steps to .5
  ====================  ====  =============  =============  =============  ============
  SAO                   0     .06 to .63     .02 to .48     .03 to .89     39, –, 29
  SAO                   1     .06 to .57     .03 to .63     .03 to .71     42, 39, 48
  SAO                   2     .09 to .63     .02 to .73     .00 to .78     37, 40, 50
  running mean, 8       0     .06 to .60     .03 to .74     .02 to .87     41, 34, 46
  running mean, 128     0     .06 to .68     .02 to .78     .01 to .91     39, 33, 35
  ====================  ====  =============  =============  =============  ============
"""

from sao_jax import config as c

STEPS_PER_STYLE = 45
BATCH = 96


def get_config() -> c.Config:
  return c.Config(
    name="online_writing",
    num_steps=3 * STEPS_PER_STYLE + 15,
    batch_size=BATCH,
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
    task=c.TaskConfig(source="writing", phase_length=STEPS_PER_STYLE * BATCH, eval_size=32),
    env=c.EnvConfig(
      name="online_writing", tool=False, max_turns=1, max_tokens=48, max_turn_tokens=36
    ),
    rollout=c.RolloutConfig(slots=32, max_len=48, max_running=64, max_staleness=2),
    sandbox=c.SandboxConfig(backend="expr"),  # no code is run
    loss=c.LossConfig(name="dis", eps_low=0.3, eps_high=5.0),
    policy=c.PolicyConfig(lr=1.5e-4, b1=0.5, warmup_steps=12),
    critic=c.CriticConfig(lr=3e-3, warmup_steps=0),
    packing=c.PackingConfig(lengths=(48,), max_segments=1),
    sft=c.SftConfig(steps=280, batch_size=64, good_fraction=0.7),
    value_pretrain=c.ValuePretrainConfig(rollouts=1024, epochs=4),
    evaluate=c.EvaluateConfig(problems=32, samples=8),
  )
