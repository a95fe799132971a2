"""The stages of a run as commands: each goes on where it was stopped, ``train`` does all of them."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from sao_jax import memory
from sao_jax.config import Config, ConfigError
from sao_jax.data.chat import Chat
from sao_jax.data.tasks import make_source, task_stream
from sao_jax.data.traces import Traces, encode_trace
from sao_jax.envs.online_writing import judge_factory
from sao_jax.rollout.service import RolloutService
from sao_jax.train.checkpoint import Checkpoints, Saved, next_incarnation
from sao_jax.train.evaluate import Evaluation, evaluate_all, metrics, paired_gain
from sao_jax.train.folder import Run, note_start, opened, read_object, refuse_unwritable
from sao_jax.train.identity import policy_settings, run_identity
from sao_jax.train.jsonlines import write_whole
from sao_jax.train.metrics import Writer, results_table
from sao_jax.train.report import write_report
from sao_jax.train.sao import train_sao
from sao_jax.train.sft import sft as supervised
from sao_jax.train.sft import tool_output
from sao_jax.train.stage import differences, refusals, refuse_changes, restore_matching
from sao_jax.train.state import Policy, load_policy, make_critic, make_state
from sao_jax.train.updates import LoopSteps
from sao_jax.train.value_pretrain import (
  Corpus,
  check_gate,
  pretrain_value,
  read_corpus,
  roll_out_corpus,
)
from sao_jax.types import Task, Version

# --- Commands ---


def sft(config: Config, *, fresh: bool = False) -> None:
  """``sao-jax sft``: the supervised start alone."""
  if not has_supervised_stage(config):
    raise ConfigError(
      "this config has no supervised start: set sft.steps, or sft.path and sft.epochs"
    )
  with opened(config, fresh) as run:
    trained_policy(run)


def pretrain_critic(config: Config, *, fresh: bool = False) -> None:
  """``sao-jax pretrain-value``: the critic, after the supervised start if there is one."""
  if not has_value_stage(config):
    raise ConfigError(
      "this config has no value pretraining: set value_pretrain.rollouts or value_pretrain.path"
    )
  with opened(config, fresh) as run:
    policy = trained_policy(run)
    if config.value_pretrain.path:
      pretrained_critic(run, policy, None)
    else:
      with serving(run, policy, policy.params, Version(0, 0)) as service:
        pretrained_critic(run, policy, service)


def train(config: Config, *, fresh: bool = False) -> dict[str, float]:
  """``sao-jax train``: every stage that the config switches on; returns the final table's numbers."""
  with opened(config, fresh) as run:
    results = finished_results(run)
    if results is not None:
      run.report(
        f"this run is complete: step {config.num_steps} of {config.num_steps} in {run.folder}. Start "
        "over with --fresh, or choose another folder with --config.run_dir=…"
      )
      run.console.print(results_table(results))
    else:
      results = reinforce(run)
    summarize_run(run, results)
  return results


def evaluate(config: Config, *, fresh: bool = False) -> dict[str, float]:
  """``sao-jax evaluate``: held-out reward of a checkpoint, or of the weights before RL."""
  with opened(config, False, starts=False) as run:
    refuse_unwritable(run.folder)
    policy, step = policy_of(run)
    with serving(run, policy, policy.params, Version(0, step)) as service:
      # Apart from what the run itself measured, whose settings may be others.
      folder = run.folder / "evaluate"
      result = evaluated(run, policy.chat, service, step, folder)
    for name, evaluation in result.items():
      low, high = evaluation.interval()
      run.report(
        f"{name}: avg@{evaluation.k} {evaluation.mean:.3f} [{low:.3f}, {high:.3f}], "
        + ", ".join(
          f"pass@{k} {p:.3f} [{low:.3f}, {high:.3f}]"
          for k, (p, low, high) in evaluation.passes().items()
        )
        + f" on {len(evaluation.rewards)} held-out problems"
      )
    run.report(f"results: {folder / 'evaluations'}/step-{step:06d}.*")
    return metrics(result)


def export(config: Config, *, out: str = "", fresh: bool = False) -> Path:
  """``sao-jax export``: the policy of a checkpoint as a folder that other libraries load."""
  from sao_jax.data.chat_template import chat_template
  from sao_jax.models.export import export_policy

  with opened(config, False, starts=False) as run:
    policy, step = policy_of(run)
    target = Path(out) if out else run.folder / "export" / f"step-{step:06d}"
    try:
      folder = export_policy(
        target, policy.config, policy.params, policy.chat, chat_template=chat_template(policy.chat)
      )
    except (ValueError, FileExistsError) as error:
      raise ConfigError(str(error)) from error
    run.report(f"exported step {step} to {folder}")
  return folder


# --- Stages ---


def first_policy(run: Run) -> Policy:
  """The policy before any training."""
  with run.phase("loading the policy"), refusals():
    policy = _load_policy(run.config)
    check_lengths(run.config, policy.chat)
    judge_factory(run.config.env.judge)  # what cannot be imported is told before any long work
  return policy


def _load_policy(config: Config) -> Policy:
  policy = load_policy(config)
  if sum(x.nbytes for x in jax.tree.leaves(policy.params)) > memory.KEEP_BELOW:
    memory.give_back_freed()
  return policy


def trained_policy(run: Run, policy: Policy | None = None) -> Policy:
  """The policy that RL starts from: first weights, after the supervised start if there is one."""
  policy = policy or first_policy(run)
  if not has_supervised_stage(run.config):
    return policy
  return supervised(run.config, policy, run.stop, run.report)


def has_supervised_stage(config: Config) -> bool:
  return bool(config.sft.steps or config.sft.epochs)


def has_value_stage(config: Config) -> bool:
  return config.critic.enabled and bool(
    config.value_pretrain.rollouts or config.value_pretrain.path
  )


def pretrained_critic(run: Run, policy: Policy, service: RolloutService | None) -> Any:
  """The critic's parameters after value pretraining."""
  critic_def, params = make_critic(policy)
  corpus: Corpus
  if service is None or run.config.value_pretrain.path:
    with refusals():
      corpus = read_corpus(run.config, policy, run.report)
  else:
    corpus = roll_out_corpus(run.config, service, run.folder / "value", run.report)
  return pretrain_value(run.config, critic_def, params, corpus, run.stop, run.report)


@contextlib.contextmanager
def serving(run: Run, policy: Policy, params: Any, version: Version) -> Iterator[RolloutService]:
  """An engine that is compiled and serves ``params``."""
  with RolloutService(
    run.config, policy.config, params, policy.chat, version, run.stop.requested
  ) as service:
    with run.phase("compiling the engine"):
      service.engine.warmup()
    yield service


def reinforce(run: Run) -> dict[str, float]:
  """RL from its newest checkpoint, or from the stages before it; returns the final table's numbers."""
  config, folder = run.config, run.folder
  policy = first_policy(run)
  with Checkpoints(
    folder / "checkpoints", config.checkpoint, config.checkpoint.every, run.report
  ) as checkpoints:
    checkpoints.refuse_if_all_damaged()
    if not checkpoints.steps():  # else nothing of the stages before is needed any more
      policy = trained_policy(run, policy)
    critic_def, critic_params = make_critic(policy) if config.critic.enabled else (None, None)
    steps, saved = restored(run, policy, critic_def, critic_params, checkpoints)
    step = saved.step if saved else 0
    incarnation = next_incarnation(folder, saved.meta["incarnation"] if saved else 0)
    note_start(run, incarnation, step)
    params = steps.policy.params if steps is not None else policy.params
    with (
      serving(run, policy, params, Version(incarnation, step)) as service,
      Writer(
        folder,
        resume_step=saved and saved.step,
        tensorboard=config.tensorboard,
        console=run.console,
      ) as writer,
    ):
      if steps is None:
        writer.write(0, metrics(evaluated(run, policy.chat, service, 0)))
        if has_value_stage(config):
          critic_params = pretrained_critic(run, policy, service)
          check_gate(config)
        steps = LoopSteps(config, policy, critic_def, critic_params, run.report)
      train_sao(
        config, steps, policy.chat, service, writer,
        checkpoints=checkpoints, resume=saved, stop=run.stop,
        evaluate=lambda version: metrics(evaluated(run, policy.chat, service, version)),
      )  # fmt: skip
      after = evaluated(run, policy.chat, service, config.num_steps)
      writer.write(config.num_steps, metrics(after))
      results = {"step": float(config.num_steps)} | summarize(run, after)
      writer.finish(results)
  write_whole(folder / "results.json", json.dumps(results, indent=2))
  return results


def restored(
  run: Run, policy: Policy, critic_def: Any, critic_params: Any, checkpoints: Checkpoints
) -> tuple[LoopSteps | None, Saved | None]:
  """The states of the newest checkpoint; (None, None) where there is none."""
  if not (found := checkpoints.steps()):
    return None, None
  refuse_fewer_steps(run, found[-1])
  steps = LoopSteps(run.config, policy, critic_def, critic_params, run.report)
  with run.phase("restoring the newest checkpoint"):
    saved = restore_matching(checkpoints, run.folder, steps.identity, steps.states())
  assert saved is not None
  steps.restore(saved.trees)
  run.report(f"going on from step {saved.step} of {run.config.num_steps}")
  return steps, saved


def refuse_fewer_steps(run: Run, newest: int) -> None:
  """Raises ConfigError if the run is further than it is asked to go."""
  if newest > run.config.num_steps:
    raise ConfigError(
      f"num_steps = {run.config.num_steps}, but {run.folder} has a checkpoint of step {newest}: ask for "
      "as many or more; an earlier step is measured by sao-jax evaluate --config.evaluate.step=…"
    )


def finished_results(run: Run) -> dict[str, float] | None:
  """The results of a run that has nothing left to do."""
  results = read_object(run.folder / "results.json", run.report)
  if not results:
    return None
  with Checkpoints(
    run.folder / "checkpoints", run.config.checkpoint, run.config.checkpoint.every, run.report
  ) as checkpoints:
    meta, steps = checkpoints.read_meta(), checkpoints.steps()
  if meta is None or not steps:
    return None
  with refusals():
    identity = run_identity(run.config)
  refuse_changes(run.folder, meta["identity"], identity)
  refuse_fewer_steps(run, steps[-1])
  # A run that was extended and stopped in its last evaluation still has the results of before.
  return results if results.get("step") == run.config.num_steps == steps[-1] else None


def policy_of(run: Run) -> tuple[Policy, int]:
  """The policy of checkpoint ``evaluate.step`` (the newest), or that before RL where there is none.

  Nothing in the folder is changed: the run may be going on.
  """
  config = run.config
  with run.phase("loading the policy"), refusals():
    policy = _load_policy(config)
  wanted: int | None = config.evaluate.step if config.evaluate.step >= 0 else None
  folder, item = run.folder / "checkpoints", "policy"
  if wanted is None and not has_checkpoints(folder):
    if not has_supervised_stage(config):
      return policy, 0
    folder, item = run.folder / "sft" / "checkpoints", "state"
  if not has_checkpoints(folder):
    raise ConfigError(f"{folder} has no checkpoint yet: run sao-jax train, or sao-jax sft, first")
  with Checkpoints(folder, config.checkpoint, 1, run.report, read_only=True) as checkpoints:
    state, _ = make_state(policy.params, config.policy, config.num_steps)
    if wanted is not None and wanted not in checkpoints.steps():
      raise ConfigError(
        f"evaluate.step = {wanted}: {folder} has checkpoints of steps {checkpoints.steps()}"
      )
    saved = checkpoints.restore({item: state}, step=wanted)
  if saved is None:
    raise ConfigError(f"{folder} has no complete checkpoint yet")
  if not saved.meta.get("finished", True):
    raise ConfigError(
      f"the supervised start in {folder} is at update {saved.step} and not finished: run sao-jax sft"
    )
  if changed := differences(saved.meta["identity"], policy_settings(config), only_now=True):
    raise ConfigError(
      f"the weights in {folder} mean something else:\n  "
      + "\n  ".join(changed)
      + "\nGive the settings that they were trained with."
    )
  policy = dataclasses.replace(policy, params=saved.trees[item].params)
  return policy, saved.step if item == "policy" else 0


def has_checkpoints(folder: Path) -> bool:
  return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


# --- Evaluation ---


def held_out(config: Config) -> list[Task]:
  """The held-out problems, numbered, so that each has sampling keys of its own."""
  source = make_source(config.task, "eval")
  count = min(config.evaluate.problems, len(source))
  return [dataclasses.replace(source[i], serial=i) for i in range(count)]


def evaluated(
  run: Run, chat: Chat, service: RolloutService, step: int, folder: Path | None = None
) -> dict[str, Evaluation]:
  """Sampled, and greedy beside it where the config wants it; the trainer waits meanwhile."""
  tasks = held_out(run.config)
  with run.phase(f"evaluating {len(tasks)} held-out problems"):
    return evaluate_all(run.config, service, tasks, chat, folder or run.folder, step)


def summarize(run: Run, after: dict[str, Evaluation]) -> dict[str, float]:
  """The final table: held-out reward before, after, gain with its paired bootstrap interval."""
  results: dict[str, float] = {"problems": float(len(after["sampled"].rewards))}
  for name, evaluation in after.items():
    results[f"{name}/after"] = evaluation.mean
    before = Evaluation.load(run.folder, 0, name)
    if before is None or not before.comparable(evaluation):
      continue  # what was asked before is not what was asked now
    gain, low, high = paired_gain(before, evaluation)
    results |= {
      f"{name}/before": before.mean,
      f"{name}/gain": gain,
      f"{name}/gain_low": low,
      f"{name}/gain_high": high,
    }
  return results


def summarize_run(run: Run, results: dict[str, float]) -> None:
  """Where everything is."""
  if run.config.report.enabled:
    run.report(f"report:  {write_report([run.folder])}")


def check_lengths(config: Config, chat: Chat, samples: int = 64) -> None:
  """Raises ConfigError when prompts, or traces to start from, do not fit ``env.max_tokens``."""
  source = make_source(config.task, "train")
  stream = task_stream(source, config.seed)
  longest = {"prompt": max(len(chat.encode_prompt(stream[i].prompt)) for i in range(samples))}
  if config.sft.steps and not config.sft.path:
    traces = Traces(source, tool_output(config), config.sft.good_fraction, config.seed)
    longest["SFT trace"] = max(len(encode_trace(traces[i], chat)[0]) for i in range(samples))
  what, length = max(longest.items(), key=lambda item: item[1])
  if length >= config.env.max_tokens:
    raise ConfigError(
      f"a {what} has {length} tokens, but env.max_tokens = {config.env.max_tokens} is all that an "
      f"episode may have. Raise env.max_tokens and rollout.max_len to {length + 16} or more, and "
      "the last of packing.lengths with them, or make the task easier."
    )
