"""What each setting may be: choices, and the ends of numbers.  ``sao_jax.checks`` applies them."""

import math

CHOICES = {
  "model.moe_impl": ("auto", "dense", "blocks", "ragged_dot"),
  "model.attention": ("auto", "dot", "chunked"),
  "model.remat": ("none", "full"),
  "model.param_dtype": ("float32", "bfloat16"),
  "model.compute_dtype": ("float32", "bfloat16"),
  "env.name": ("math_tool", "online_writing", "coding"),
  "weights.source": ("random", "smollm2", "gguf", "huggingface"),
  "chat.format": ("char", "chatml", "plain"),
  "task.source": ("arithmetic", "jsonl", "writing"),
  "task.kind": ("expression", "word_problem", "mix", "sum"),
  "env.answer": ("tag", "line", "boxed"),
  "env.grade": ("exact", "math"),
  "sandbox.backend": ("auto", "bwrap", "expr", "unsafe"),
  "rollout.compute_dtype": ("", "float32", "bfloat16"),
  "rollout.kv": ("keep", "recompute"),
  "rollout.stale": ("mask", "drop"),
  "rollout.truncation": ("terminal", "mask", "bootstrap"),
  "rollout.segment_reward": ("share", "last"),
  "loss.name": ("dis", "ppo", "decoupled_ppo", "a3po", "cispo", "icepop"),
  "loss.prox": ("rollout", "recompute", "reuse", "ewma", "snapshot"),
  "loss.average": ("token", "episode"),
  "policy.schedule": ("constant", "cosine"),
  "critic.schedule": ("constant", "cosine"),
  "sft.schedule": ("constant", "cosine"),
  "value_pretrain.schedule": ("constant", "cosine"),
  "advantage.name": ("gae", "group", "running_mean", "batch_mean"),
  "advantage.level": ("token", "step_last", "step_mean"),
  "advantage.group_scale": ("std", "none"),
  "advantage.window_per": ("prompt", "run"),
  "advantage.normalize": ("none", "batch"),
  "critic.advantages": ("before", "after"),
}


# Numbers are 0 or more, except these; and more than 0 where 0 would leave nothing to run.
ANY_SIGN = (
  *("seed", "task.shuffle_seed", "advantage.lambda_", "advantage.reward_scale"),
  *("advantage.reward_bias", "evaluate.temperature", "evaluate.step", "loss.positive_above"),
  "critic.min_explained_variance",
)
MAY_BE_ZERO = (
  *("model.num_experts", "weights.upcycle_experts", "rollout.prefix_cache_mb", "packing.rows"),
  *(
    "rollout.top_k",
    "rollout.max_staleness",
    "rollout.min_staleness",
    "sft.steps",
    "value_pretrain.rollouts",
  ),
  *("critic.updates_per_step", "critic.only_steps", "sft.epochs", "value_pretrain.max_solutions"),
  *("evaluate.every", "evaluate.top_k", "checkpoint.keep_every", "report.trajectories_every"),
)
MAY_BE_INFINITE = {"critic.min_explained_variance": -math.inf, "loss.eps_high": math.inf}
LARGEST = 3.4e38  # of float32, in which everything is computed
SEEDS = ("seed", "task.shuffle_seed")
LARGEST_SEED = 2**32 - 1  # JAX makes no more of it
TEMPERATURES = (1e-6, 1e6)  # the engine's
STAGES = ("policy", "critic", "sft", "value_pretrain")
OPTIMIZER_COUNTS = tuple(f"{stage}.warmup_steps" for stage in STAGES)
MORE_THAN_ZERO = (
  *("env.max_seconds", "sandbox.wall_seconds", "rollout.await_seconds", "advantage.alpha"),
  *(f"{stage}.clip_norm" for stage in STAGES),
  *("evaluate.top_p", "model.rope_theta", "model.norm_eps"),
)
BELOW_ONE = tuple(f"{stage}.{name}" for stage in STAGES for name in ("b1", "b2"))
AT_MOST_ONE = (
  *("critic.lambda_", "advantage.lambda_", "advantage.gamma", "loss.alpha_at_zero"),
  "loss.prox_decay",
  *("sft.good_fraction", "rollout.top_p", "evaluate.top_p", "critic.min_explained_variance"),
)
