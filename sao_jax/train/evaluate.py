"""Held-out reward, sampled and greedy, through the same episode code as training.

avg@k is the mean reward of k samples a task, pass@k the chance that one of k samples gets full
marks; both are means over tasks, with bootstrap intervals over tasks.
"""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Num
from scipy import stats

from sao_jax.config import Config
from sao_jax.data.chat import Chat
from sao_jax.outcome import RunFailed
from sao_jax.rollout.service import RolloutService
from sao_jax.train.jsonlines import read_rows, write_whole
from sao_jax.types import Episode, Task

log = logging.getLogger(__name__)

FULL_MARKS = 1.0 - 1e-6  # a sample passes with this reward; part marks count in avg@k only
BETWEEN_TURNS = "\n⋯\n"  # in stored replies, where the environment spoke
_SEED = 1_000_003  # keeps the keys of evaluations apart from those of training


class WeightsMoved(RuntimeError):
  """One evaluation sampled under several policy versions: it measures none of them."""


def pass_at_k(n: int, c: int, k: int) -> float:
  """Chance that k samples, drawn from n of which c passed, hold one that passed.

  1 − C(n−c, k) / C(n, k), the unbiased estimator of pass@k (arXiv 2107.03374), as a product that
  cannot overflow.  Raises ValueError unless 1 ≤ k ≤ n and 0 ≤ c ≤ n.
  """
  if not 1 <= k <= n or not 0 <= c <= n:
    raise ValueError(
      f"pass@k with k = {k} of n = {n} samples, c = {c} of them passed: needs 1 ≤ k ≤ n and "
      "0 ≤ c ≤ n; raise evaluate.samples for a larger k"
    )
  if n - c < k:
    return 1.0
  return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Rewards [tasks, k] in the order of the tasks, and the episodes, samples of a task together.

  A vector of rewards is taken as k = 1.  ``sampling`` says how the tokens were drawn.
  """

  rewards: Num[np.ndarray, "N *k"]
  episodes: tuple[Episode, ...] = ()
  sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    object.__setattr__(self, "rewards", self.rewards.reshape(len(self.rewards), -1))

  @property
  def k(self) -> int:
    return self.rewards.shape[1]

  @property
  def per_task(self) -> Num[np.ndarray, "N"]:
    return self.rewards.mean(1)

  @property
  def mean(self) -> float:
    """avg@k."""
    return float(self.per_task.mean())

  def interval(self) -> tuple[float, float]:
    """Bootstrap 95 % interval of the mean over tasks."""
    return bootstrap_interval(self.per_task)

  def passes(self) -> dict[int, tuple[float, float, float]]:
    """k′ → (pass@k′, low, high) for k′ = 1, 2, 4, … and k."""
    counts = (self.rewards >= FULL_MARKS).sum(1).tolist()
    sizes = sorted({2**i for i in range(self.k.bit_length()) if 2**i <= self.k} | {self.k})
    result = {}
    for size in sizes:
      chances = np.array([pass_at_k(self.k, c, size) for c in counts])
      result[size] = float(chances.mean()), *bootstrap_interval(chances)
    return result

  def comparable(self, other: "Evaluation") -> bool:
    """Whether both asked the same of as many tasks, so that their difference is the weights'."""
    same = self.rewards.shape == other.rewards.shape
    return same and dict(self.sampling) == dict(other.sampling)

  def summary(self) -> dict[str, Any]:
    """What evaluations/step-*.json holds of it."""
    low, high = self.interval()
    passes = {str(size): numbers for size, numbers in self.passes().items()}
    return {
      "k": self.k,
      "problems": len(self.rewards),
      "sampling": dict(self.sampling),
      "avg": self.mean,
      "avg_low": low,
      "avg_high": high,
      "pass": {size: p for size, (p, _, _) in passes.items()},
      "pass_low": {size: low for size, (_, low, _) in passes.items()},
      "pass_high": {size: high for size, (_, _, high) in passes.items()},
    }

  @classmethod
  def load(cls, folder: Path, step: int, name: str) -> "Evaluation | None":
    """What was written of an evaluation, without its episodes; None where it is not whole."""
    stem = _stem(folder, step)
    try:
      sampling = json.loads(stem.with_suffix(".json").read_text())[name]["sampling"]
      rows = read_rows(stem.with_suffix(f".{name}.jsonl"))
    except (FileNotFoundError, ValueError, KeyError, RunFailed):
      return None
    rewards = np.array([row["rewards"] for row in rows], np.float32)
    return cls(rewards, sampling=sampling) if len(rewards) else None

  def save(self, folder: Path, step: int, name: str, tasks: Sequence[Task], chat: Chat) -> Path:
    """Writes ``folder``/evaluations/step-<step>.<name>.jsonl, a line per task; returns its path."""
    lines = []
    for i, task in enumerate(tasks):
      episodes = self.episodes[i * self.k : (i + 1) * self.k]
      line = {
        "id": task.id,
        "serial": task.serial,
        "answer": task.meta.get("answer"),
        "rewards": self.rewards[i].tolist(),
        "actions": [episode.num_actions for episode in episodes],
        "statuses": [episode.status for episode in episodes],
        "replies": [BETWEEN_TURNS.join(action_turns(episode, chat)) for episode in episodes],
      }
      lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return _write(_stem(folder, step).with_suffix(f".{name}.jsonl"), "".join(lines))


def action_turns(episode: Episode, chat: Chat) -> Iterator[str]:
  """The text of each turn of the policy, control tokens included."""
  for trajectory in episode.trajectories:
    mask = np.pad(trajectory.action_mask, 1).astype(np.int8)
    starts, stops = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    for start, stop in zip(starts, stops, strict=True):
      yield chat.decode(trajectory.tokens[start:stop])


def _stem(folder: Path, step: int) -> Path:
  return folder / "evaluations" / f"step-{step:06d}"


def _write(path: Path, text: str) -> Path:
  path.parent.mkdir(parents=True, exist_ok=True)
  write_whole(path, text)
  return path


def bootstrap_interval(x: Num[np.ndarray, "N"], resamples: int = 10_000) -> tuple[float, float]:
  """Percentile bootstrap 95 % interval of the mean of ``x``."""
  if np.ptp(x) == 0:
    return float(x[0]), float(x[0])
  result = stats.bootstrap(
    (x,),
    np.mean,
    n_resamples=resamples,
    method="percentile",
    rng=np.random.default_rng(0),
    batch=500,
  )
  return float(result.confidence_interval.low), float(result.confidence_interval.high)


def paired_gain(before: Evaluation, after: Evaluation) -> tuple[float, float, float]:
  """(gain, low, high): mean difference on the same tasks and its paired bootstrap 95 % interval."""
  difference = after.per_task - before.per_task
  return float(difference.mean()), *bootstrap_interval(difference)


def evaluate(
  config: Config,
  service: RolloutService,
  tasks: Sequence[Task],
  *,
  greedy: bool = False,
  on_done: Callable[[int], None] | None = None,
) -> Evaluation:
  """Runs every task ``evaluate.samples`` times with the service's weights.

  The sampling keys depend on ``config.seed``, the task's serial and the sample only, so two
  evaluations of equal weights are equal.  Greedy samples of a task would all be the same: at
  temperature 0 there is one.  Episodes of a training run may share the engine meanwhile; their
  tokens do not change.

  Args:
    config: reads ``evaluate``, ``rollout`` and ``seed``.
    service: its weights must stand still until this returns.
    tasks: each with a serial of its own.
    greedy: temperature 0, whatever the config says.
    on_done: called with the number of finished episodes after each.

  Raises:
    WeightsMoved: new weights were published meanwhile.
    EnvFailure, EngineFailure, EpisodeStalled: an episode failed ``rollout.attempts`` times.
  """
  temperature, samples = _sampling(config, greedy)
  evicted = service.engine.metrics()["evicted_sessions"]
  episodes = service.run(
    tasks,
    temperature=temperature,
    top_k=config.evaluate.top_k,
    top_p=config.evaluate.top_p,
    seed=config.seed + _SEED,
    samples=samples,
    on_done=on_done,
  )
  _check_version(episodes)
  if (evicted := service.engine.metrics()["evicted_sessions"] - evicted) > 0:
    log.warning(
      "%d episodes lost their keys and values between turns and had them computed again, so "
      "log-probs may differ in their last bits from an equal run's: rollout.prefix_cache_mb = %d is "
      "too small for rollout.max_running = %d",
      evicted,
      config.rollout.prefix_cache_mb,
      config.rollout.max_running,
    )
  rewards = np.array([episode.reward for episode in episodes], np.float32)
  sampling = {"temperature": temperature, "top_k": config.evaluate.top_k}
  return Evaluation(
    rewards.reshape(len(tasks), samples),
    tuple(episodes),
    {**sampling, "top_p": config.evaluate.top_p},
  )


def _sampling(config: Config, greedy: bool) -> tuple[float, int]:
  """(temperature, samples of a task)."""
  chosen = config.evaluate
  temperature = config.rollout.temperature if chosen.temperature < 0 else chosen.temperature
  return (temperature, chosen.samples) if temperature > 0 and not greedy else (0.0, 1)


def _check_version(episodes: Sequence[Episode]) -> None:
  versions = {
    (episode.incarnation, int(step))
    for episode in episodes
    for trajectory in episode.trajectories
    for step in np.unique(trajectory.policy_version[trajectory.action_mask])
  }
  if len(versions) > 1:
    raise WeightsMoved(
      f"one evaluation sampled under {len(versions)} policy versions, {min(versions)} to "
      f"{max(versions)} (incarnation, step): publish no weights before evaluate() has returned"
    )


def evaluate_all(
  config: Config,
  service: RolloutService,
  tasks: Sequence[Task],
  chat: Chat,
  folder: Path,
  step: int,
  on_done: Callable[[str, int, int], None] | None = None,
) -> dict[str, Evaluation]:
  """Sampled and, with ``evaluate.greedy``, greedy; their files go to the run's ``folder``.

  The summary is written last: where it is, everything is.  ``on_done(what, done, of)`` is called
  after each episode.  Raises what ``evaluate`` raises.
  """
  result = {}
  for name in ("sampled", "greedy") if config.evaluate.greedy else ("sampled",):
    greedy = name == "greedy"
    of = len(tasks) * _sampling(config, greedy)[1]
    report = None if on_done is None else functools.partial(_report, on_done, name, of)
    result[name] = evaluate(config, service, tasks, greedy=greedy, on_done=report)
  for name, evaluation in result.items():
    evaluation.save(folder, step, name, tasks, chat)
  summaries = {name: evaluation.summary() for name, evaluation in result.items()}
  text = json.dumps({"step": step, **summaries}, indent=2) + "\n"
  _write(_stem(folder, step).with_suffix(".json"), text)
  return result


def _report(on_done: Callable[[str, int, int], None], what: str, of: int, done: int) -> None:
  on_done(what, done, of)


def metrics(evaluations: dict[str, Evaluation]) -> dict[str, float]:
  """The eval/* numbers of a line of metrics.jsonl: avg@k, and pass@k of the sampled one."""
  row = {f"eval/{name}": evaluation.mean for name, evaluation in evaluations.items()}
  sampled = evaluations["sampled"]
  return row | {"eval/pass_at_k": sampled.passes()[sampled.k][0]}
