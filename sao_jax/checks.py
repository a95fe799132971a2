"""What a configuration must not say: choices, bounds and combinations that span its parts.

Nothing here imports JAX, so that errors in a config answer at once.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Iterator

from sao_jax import bounds, lexicon
from sao_jax.config import Config, ConfigError

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # env.judge
# What writing alone reads, and what it does not read.
_OF_WRITING = ("env.judge", "task.styles", "task.phase_length")
_UNREAD = "env.answer env.grade env.max_observation task.kind task.difficulty task.digits".split()


def _get(config: object, path: str):
  for part in path.split("."):
    config = getattr(config, part)
  return config


def _leaves(config: object, prefix: str = "") -> Iterator[tuple[str, object, object]]:
  """(path, value, declared type) of every setting."""
  types = typing.get_type_hints(type(config))
  for leaf in dataclasses.fields(config):  # type: ignore[arg-type]
    path, value = prefix + leaf.name, getattr(config, leaf.name)
    if dataclasses.is_dataclass(value):
      yield from _leaves(value, path + ".")
    else:
      yield path, value, types[leaf.name]


def check(config: Config) -> Config:
  """Refuses combinations that would train something else than they say.

  Returns the config unchanged.  Raises ConfigError naming the field, its value and the way out.
  """
  for path, value, kind in _leaves(config):
    if not _is_a(value, kind):
      name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else kind
      raise ConfigError(f"{path} = {value!r}: expected {name}, not {type(value).__name__}")
  for path, choices in bounds.CHOICES.items():
    if (value := _get(config, path)) not in choices:
      raise ConfigError(f"{path} = {value!r}: choose one of {', '.join(choices)}")
  _check_numbers(config)
  _check_sampling(config)
  _check_texts(config)
  _check_env(config)
  _check_sizes(config)
  _check_model(config)
  _check_algorithm(config)
  _check_stages(config)
  return config


def _is_a(value: object, kind: typing.Any) -> bool:
  """As declared; a whole number may stand where a float does."""
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    return isinstance(value, tuple) and all(_is_a(item, element) for item in value)
  if isinstance(value, bool) or kind is bool:
    return kind is bool and isinstance(value, bool)
  return isinstance(value, int | float if kind is float else kind)


def _check_numbers(config: Config) -> None:
  for path, value, kind in _leaves(config):
    if kind not in (int, float):
      continue
    assert isinstance(value, int | float)
    if (
      value != bounds.MAY_BE_INFINITE.get(path)
      and not abs(value) <= bounds.LARGEST
      and path not in bounds.SEEDS
    ):
      raise ConfigError(f"{path} = {value}: must be a finite number, of at most {bounds.LARGEST:g}")
    least = 1 if kind is int and path not in bounds.MAY_BE_ZERO + bounds.OPTIMIZER_COUNTS else 0
    if path not in bounds.ANY_SIGN + bounds.SEEDS and value < least:
      raise ConfigError(f"{path} = {value}: must be {least} or more")
    if kind is int and path not in bounds.SEEDS and value >= 2**31:
      raise ConfigError(f"{path} = {value}: must be below 2^31")
  for path in bounds.SEEDS:
    if not 0 <= (value := _get(config, path)) <= bounds.LARGEST_SEED:
      raise ConfigError(
        f"{path} = {value}: must be 0 or more and at most {bounds.LARGEST_SEED} (2^32 - 1)"
      )
  for path in bounds.MORE_THAN_ZERO:
    if (value := _get(config, path)) <= 0:
      raise ConfigError(f"{path} = {value}: must be more than 0")
  for path in bounds.AT_MOST_ONE:
    if (value := _get(config, path)) > 1:
      raise ConfigError(f"{path} = {value}: must be 1 or less")
  for path in bounds.BELOW_ONE:  # 1 − b is divided by, in float32
    if (value := _get(config, path)) > 1 - 1e-7:
      raise ConfigError(
        f"{path} = {value}: must be below 1, by 1e-7 or more; Adam divides by 1 - it"
      )
  for stage in bounds.STAGES:
    optimizer = _get(config, stage)
    if optimizer.eps < 1e-30:  # a parameter without a gradient would be moved by 0 / 0
      raise ConfigError(f"{stage}.eps = {optimizer.eps}: must be 1e-30 or more")
    if optimizer.clip_norm > 1e18:
      raise ConfigError(
        f"{stage}.clip_norm = {optimizer.clip_norm}: must be 1e18 or less, for Adam squares gradients; "
        "1e9 already clips nothing"
      )


def _check_sampling(config: Config) -> None:
  rollout = config.rollout
  if rollout.top_p != 1.0 or rollout.top_k != 0:
    raise ConfigError(
      f"rollout.top_p = {rollout.top_p}, rollout.top_k = {rollout.top_k}: training samples from the "
      "whole distribution. A truncated distribution is not the policy that the importance ratio "
      "divides by, so the gradient would be biased. Leave top_p = 1 and top_k = 0 (evaluation may "
      "truncate)."
    )
  least, most = bounds.TEMPERATURES
  if rollout.temperature <= 0:
    raise ConfigError(
      f"rollout.temperature = {rollout.temperature}: training needs a temperature above 0; greedy "
      "rollouts have no log-probability to form a ratio with."
    )
  if not least <= rollout.temperature <= most:
    raise ConfigError(
      f"rollout.temperature = {rollout.temperature}: the engine samples at {least:g} to {most:g}"
    )
  evaluated = config.evaluate.temperature
  if evaluated > 0 and not least <= evaluated <= most:
    raise ConfigError(
      f"evaluate.temperature = {evaluated}: the engine samples at {least:g} to {most:g}; 0 is greedy, "
      "and below 0 means rollout.temperature"
    )
  if rollout.min_staleness > rollout.max_staleness:
    raise ConfigError(
      f"rollout.min_staleness = {rollout.min_staleness} exceeds rollout.max_staleness = "
      f"{rollout.max_staleness}: no episode could be trained; raise rollout.max_staleness"
    )
  _check_running(config)


def _check_running(config: Config) -> None:
  rollout = config.rollout
  if rollout.max_running < config.group_size:
    raise ConfigError(
      f"rollout.max_running = {rollout.max_running} is less than group_size = {config.group_size}: a "
      "group starts at once; raise rollout.max_running"
    )
  beside = 1 if config.evaluate.every else 0  # an evaluation meanwhile needs room for an episode
  room = rollout.slots + rollout.max_queued - beside
  if rollout.max_running > room:
    kept = ", and one place is the evaluation's that runs beside them" if beside else ""
    raise ConfigError(
      f"rollout.max_running = {rollout.max_running}: the engine takes rollout.slots = {rollout.slots} "
      f"and rollout.max_queued = {rollout.max_queued} requests at once{kept}, and would refuse the "
      f"others' until their tasks are given up. Set rollout.max_running = {max(room, 1)} or less, or "
      "raise rollout.max_queued"
    )


def _check_texts(config: Config) -> None:
  if not (config.name or config.run_dir):
    raise ConfigError("name = '' and run_dir = '': the run's folder needs a name; set one of them")
  folder = config.folder
  for place in (folder, *folder.parents):
    if place.exists():
      if not place.is_dir():
        raise ConfigError(
          f"run_dir = {config.run_dir!r}, name = {config.name!r}: the run lives in the folder {folder}, "
          f"but {place} is a file; choose another run_dir"
        )
      break
  for path in ("critic.trainable", "value_pretrain.trainable"):
    for pattern in _get(config, path):
      try:
        re.compile(pattern)
      except re.error as error:
        raise ConfigError(f"{path} = {pattern!r} is no regular expression: {error}") from error
  if config.env.answer == "boxed" and config.chat.format == "char":
    raise ConfigError(
      "env.answer = 'boxed' with chat.format = 'char', whose vocabulary has no backslash: no answer "
      "could be given. Set env.answer = 'tag' or another chat.format"
    )


def _check_env(config: Config) -> None:
  env, task = config.env, config.task
  writing = env.name == "online_writing"
  if writing != (task.source == "writing"):
    raise ConfigError(
      f"env.name = {env.name!r} with task.source = {task.source!r}: 'online_writing' and 'writing' need "
      "each other; change one of them"
    )
  fixed: dict[str, object] = {"env.tool": False, "env.max_turns": 1} if writing else {}
  for path in _UNREAD if writing else _OF_WRITING:
    fixed[path] = _get(Config(), path)
  for path, value in fixed.items():
    if (given := _get(config, path)) != value:
      raise ConfigError(
        f"{path} = {given!r} has no effect with env.name = {env.name!r}: set {path} = {value!r}"
      )
  if env.judge != "rules" and not _FACTORY.fullmatch(env.judge):
    raise ConfigError(f"env.judge = {env.judge!r}: 'rules', or 'package.module:factory'")
  if not task.styles or (env.judge == "rules" and not set(task.styles) <= set(lexicon.STYLES)):
    raise ConfigError(
      f"task.styles = {task.styles}: one or more of {', '.join(lexicon.STYLES)}, or another env.judge's"
    )
  if writing and config.value_pretrain.rollouts > task.phase_length:
    raise ConfigError(
      f"value_pretrain.rollouts = {config.value_pretrain.rollouts} exceeds task.phase_length = "
      f"{task.phase_length}: the critic would be fitted to a style that is wanted later; lower it"
    )


def _check_sizes(config: Config) -> None:
  if config.batch_size % config.group_size:
    raise ConfigError(
      f"batch_size = {config.batch_size} is not a multiple of group_size = {config.group_size}"
    )
  if config.env.max_tokens > config.rollout.max_len:
    raise ConfigError(
      f"env.max_tokens = {config.env.max_tokens} exceeds rollout.max_len = {config.rollout.max_len}: "
      "an episode must fit its slot; raise rollout.max_len or lower env.max_tokens."
    )
  if min(config.packing.lengths, default=1) < 1:
    raise ConfigError(f"packing.lengths = {config.packing.lengths}: each must be 1 or more")
  if config.packing.lengths and max(config.packing.lengths) < config.env.max_tokens:
    raise ConfigError(
      f"packing.lengths ends at {max(config.packing.lengths)}, below env.max_tokens = "
      f"{config.env.max_tokens}: the longest episode would not fit a row."
    )
  rows = config.packing.rows or config.batch_size
  parts = config.policy.minibatches * config.policy.micro_batches
  if rows % parts:
    raise ConfigError(
      f"{rows} rows do not split into policy.minibatches · policy.micro_batches = {parts} parts"
    )
  if rows % config.critic.micro_batches:
    raise ConfigError(
      f"{rows} rows do not split into critic.micro_batches = {config.critic.micro_batches} parts"
    )
  devices = config.mesh.data * config.mesh.fsdp * config.mesh.expert
  for name, count in (
    ("rows of a minibatch", rows // config.policy.minibatches),
    ("sft.batch_size", config.sft.batch_size),
    ("value_pretrain.batch_size", config.value_pretrain.batch_size),
  ):
    if count % devices:
      raise ConfigError(
        f"{name} = {count} do not split over the {devices} devices of mesh.data · fsdp · expert"
      )


def _check_model(config: Config) -> None:
  model = config.model
  if model.num_experts and model.experts_per_token > model.num_experts:
    raise ConfigError(
      f"model.experts_per_token = {model.experts_per_token} exceeds model.num_experts = "
      f"{model.num_experts}"
    )
  if model.num_heads % model.num_kv_heads:
    raise ConfigError(
      f"model.num_heads = {model.num_heads} is not a multiple of model.num_kv_heads = "
      f"{model.num_kv_heads}"
    )
  if model.head_dim % 2:
    raise ConfigError(
      f"model.head_dim = {model.head_dim} is odd: rotary embeddings turn pairs of numbers"
    )


def _check_algorithm(config: Config) -> None:
  loss = config.loss
  if loss.name == "a3po" and loss.alpha_at_zero == 0 and config.policy.minibatches > 1:
    raise ConfigError(
      f"loss.alpha_at_zero = 0 with policy.minibatches = {config.policy.minibatches}: a fresh token "
      "would have no trust region after the first minibatch. Set loss.alpha_at_zero = 1 or "
      "policy.minibatches = 1."
    )
  if loss.alpha_at_zero and loss.name != "a3po":
    raise ConfigError(
      f"loss.alpha_at_zero = {loss.alpha_at_zero} has no effect with loss.name = {loss.name!r}: only "
      "a3po has an α"
    )
  _check_prox(config)
  _check_advantage(config)
  if config.critic.enabled and config.critic.updates_per_step < 1:
    raise ConfigError(
      f"critic.updates_per_step = {config.critic.updates_per_step}: a critic that is never updated; "
      "set critic.enabled = False or at least 1."
    )
  if config.critic.only_steps >= config.num_steps:
    raise ConfigError(
      f"critic.only_steps = {config.critic.only_steps} of num_steps = {config.num_steps}: the policy "
      "would never be trained"
    )


def _check_prox(config: Config) -> None:
  loss = config.loss
  if loss.prox != "rollout" and loss.name in ("dis", "a3po"):
    raise ConfigError(
      f"loss.prox = {loss.prox!r} has no effect with loss.name = {loss.name!r}, whose ratio is against "
      "the policy that sampled; choose loss.prox = 'rollout' or another loss"
    )
  if loss.prox == "reuse" and config.policy.minibatches > 1:
    raise ConfigError(
      f"loss.prox = 'reuse' with policy.minibatches = {config.policy.minibatches}: the log-probs of a "
      "later minibatch's forward are not those before the step. Set policy.minibatches = 1 or "
      "loss.prox = 'recompute'."
    )
  if loss.name == "icepop" and not 0 <= loss.min_behavior_weight < loss.max_behavior_weight:
    raise ConfigError(
      f"loss.name = 'icepop' with loss.min_behavior_weight = {loss.min_behavior_weight} and "
      f"loss.max_behavior_weight = {loss.max_behavior_weight}: the article has 0.5 and 5"
    )
  if loss.min_behavior_weight and loss.name != "icepop":
    raise ConfigError(
      f"loss.min_behavior_weight = {loss.min_behavior_weight} has no effect with loss.name = "
      f"{loss.name!r}: only icepop has a lower end"
    )
  if loss.max_behavior_weight and loss.name not in ("icepop", "a3po", "decoupled_ppo"):
    raise ConfigError(
      f"loss.max_behavior_weight = {loss.max_behavior_weight} has no effect with loss.name = "
      f"{loss.name!r}: only a3po, decoupled_ppo and icepop have a behaviour weight"
    )


def _check_advantage(config: Config) -> None:
  advantage, name = config.advantage, config.advantage.name
  if name == "gae" and not config.critic.enabled:
    raise ConfigError(
      f"advantage.name = {name!r} needs the critic; set critic.enabled = True or advantage.name = "
      "'batch_mean'."
    )
  if name != "gae" and config.critic.enabled:
    raise ConfigError(
      f"advantage.name = {name!r} does without the critic, which would be trained for nothing: set "
      "critic.enabled = False or advantage.name = 'gae'"
    )
  if name != "gae" and config.rollout.truncation == "bootstrap":
    raise ConfigError(
      "rollout.truncation = 'bootstrap' needs a critic's value of the truncated state, which "
      f"advantage.name = {name!r} does without; choose 'terminal' or 'mask'."
    )
  if name == "group" and config.group_size < 2:
    raise ConfigError(
      f"advantage.name = 'group' with group_size = {config.group_size}: the mean of a group of one is "
      "the return itself, so no advantage would differ from 0. Set group_size to 2 or more."
    )
  if advantage.level == "token":
    return
  if name != "gae":
    raise ConfigError(
      f"advantage.level = {advantage.level!r} has no effect with advantage.name = {name!r}"
    )
  if not advantage.skip_observations or config.critic.lambda_ != 1.0:
    raise ConfigError(
      f"advantage.level = {advantage.level!r} counts turns, which are runs of actions, and trains the "
      "critic on whole returns: it needs advantage.skip_observations = True (is "
      f"{advantage.skip_observations}) and critic.lambda_ = 1 (is {config.critic.lambda_})"
    )


def _check_stages(config: Config) -> None:
  if config.evaluate.problems > config.task.eval_size and config.task.source != "jsonl":
    raise ConfigError(
      f"evaluate.problems = {config.evaluate.problems} exceeds task.eval_size = "
      f"{config.task.eval_size}, the number of held-out problems; raise task.eval_size"
    )
  if config.weights.source == "random" and config.weights.upcycle_experts:
    raise ConfigError(
      f"weights.upcycle_experts = {config.weights.upcycle_experts} splits pretrained weights; with "
      "weights.source = 'random' set model.num_experts instead"
    )
  if config.chat.format == "char" and config.chat.tokenizer:
    raise ConfigError(
      f"chat.tokenizer = {config.chat.tokenizer!r} has no effect: chat.format = 'char' brings its own"
    )
  _check_sft(config)
  _check_value_pretrain(config)


def _check_sft(config: Config) -> None:
  stage = config.sft
  if stage.path and bool(stage.steps) == bool(stage.epochs):
    raise ConfigError(
      f"sft.path = {stage.path!r} with sft.steps = {stage.steps} and sft.epochs = {stage.epochs}: set "
      "one of the two"
    )
  if stage.epochs and not stage.path:
    raise ConfigError(
      f"sft.epochs = {stage.epochs} without sft.path: generated traces never end; set sft.steps"
    )


def _check_value_pretrain(config: Config) -> None:
  stage = config.value_pretrain
  name = "path" if stage.path else "rollouts"
  if stage.path and stage.rollouts:
    raise ConfigError(
      f"value_pretrain.path = {stage.path!r} and value_pretrain.rollouts = {stage.rollouts}: choose one "
      "corpus"
    )
  if stage.max_solutions and not stage.path:
    raise ConfigError(
      f"value_pretrain.max_solutions = {stage.max_solutions} has no effect without value_pretrain.path"
    )
  if not (stage.rollouts or stage.path):
    if config.critic.min_explained_variance > -math.inf:
      raise ConfigError(
        f"critic.min_explained_variance = {config.critic.min_explained_variance} is measured by value "
        "pretraining, which is off: set value_pretrain.rollouts or value_pretrain.path"
      )
    return
  if not config.critic.enabled:
    raise ConfigError(
      f"value_pretrain.{name} = {getattr(stage, name)!r} without a critic: set critic.enabled = True or "
      "switch value pretraining off"
    )
  trained = stage.rollouts - max(stage.rollouts // 8, 1)  # the rest is held out
  if stage.rollouts and trained < stage.batch_size:
    raise ConfigError(
      f"value_pretrain.rollouts = {stage.rollouts} leaves {trained} to train on, less than one "
      f"batch of value_pretrain.batch_size = {stage.batch_size}"
    )
  if stage.batch_size % config.critic.micro_batches:
    raise ConfigError(
      f"value_pretrain.batch_size = {stage.batch_size} does not split into critic.micro_batches = "
      f"{config.critic.micro_batches} parts"
    )
