"""What crosses module borders, and the time convention that every module keeps.

**Index t is token t** — for tokens, masks, rollout_logprobs, policy_version, temperature, logprobs,
values, rewards, discounts and advantages alike::

    logprobs[t]    = log π(tokens[t] | tokens[<t])
    values[t]      = V(tokens[<t])            next_values[t] = V(tokens[<=t])
    rewards[t]     is received for token t

The shift by one lives in exactly one function, ``models.transformer.shift_right``.  Position 0 is
never an action.  A reward that arrives after an observation belongs to the last action token before
it.

``action_mask`` says what the policy sampled and never changes: advantages, l (the number of action
tokens), reward placement and values use it.  ``loss_mask ⊆ action_mask`` says what the policy loss
trains; staleness and ``truncation="mask"`` leave only that.

An **episode** is one run of one environment, a **trajectory** is one token sequence of it (usually
one each).  Queue, admission, accounting and groups count episodes; packing, advantages and l work
per trajectory.  Host data is ragged numpy and frozen; device data is one ``Batch``, complete when
made.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, TypedDict

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32


class Message(TypedDict):
  """One chat message: ``role`` is system | user | assistant | tool."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True)
class Task:
  """One prompt from a task source.

  ``serial`` counts tasks over all epochs of a run's stream (stream[serial] is this task again), so a
  task drawn in two epochs has two serials and one id.  ``meta`` holds what grading needs.
  """

  id: str
  prompt: list[Message]
  meta: dict[str, Any]
  serial: int = 0


class Version(NamedTuple):
  """A policy version: every trainer start takes a new incarnation, step counts consumed batches.

  Compared lexicographically; engines never go back.
  """

  incarnation: int
  step: int


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one completion is drawn.

  ``key`` is the two uint32 words of a JAX PRNG key made from (run seed, task serial, sample,
  attempt); the engine folds in the absolute index of each token, so a completion depends on neither
  its slot nor its neighbours.  ``top_k = 0`` and ``top_p = 1`` switch truncation off.
  ``temperature = 0`` is greedy.
  """

  max_new_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  stop_ids: tuple[int, ...] = ()
  key: tuple[int, int] = (0, 0)


@dataclasses.dataclass(frozen=True)
class Completion:
  """What the engine sampled: ids that are never re-tokenised, and how each was drawn.

  ``logprobs`` is after temperature, before top-k/top-p: the one that importance ratios use (greedy
  reports it at T = 1).  ``sampled_logprobs`` is after truncation: diagnostic only.
  ``policy_version[t]`` is the step of the weights that sampled token t, from the same read as the
  weights.  ``routes`` are the experts chosen per token (size 0 when not recorded).
  """

  tokens: Int32[np.ndarray, "n"]
  logprobs: Float32[np.ndarray, "n"]
  sampled_logprobs: Float32[np.ndarray, "n"]
  policy_version: Int32[np.ndarray, "n"]
  temperature: float
  stop: Literal["stop", "length"]
  incarnation: int = 0
  routes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0), np.int32))


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One token sequence of an episode, ragged, on the host.

  ``policy_version`` is -1, ``rollout_logprobs`` 0 and ``temperature`` 1 where nothing was sampled.
  """

  task_id: str
  episode_id: str
  segment: int
  group: int
  tokens: Int32[np.ndarray, "T"]
  action_mask: Bool[np.ndarray, "T"]
  rollout_logprobs: Float32[np.ndarray, "T"]
  policy_version: Int32[np.ndarray, "T"]
  temperature: Float32[np.ndarray, "T"]
  rewards: Float32[np.ndarray, "T"]
  truncated: bool
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)
  routes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0, 0), np.int32))


@dataclasses.dataclass(frozen=True)
class Episode:
  """One run of one environment, finished: what the queue holds and the trainer consumes.

  ``status`` is "done" or "truncated" (the episode's budget was spent).  Failures of infrastructure
  are not episodes: they are retried and counted, never trained.
  """

  episode_id: str
  task_serial: int
  sample: int
  attempt: int
  group: int
  trajectories: tuple[Trajectory, ...]
  status: Literal["done", "truncated"]
  reward: float
  incarnation: int = 0
  started: float = 0.0  # time.monotonic() seconds
  finished: float = 0.0
  metrics: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def num_actions(self) -> int:
    return int(sum(t.action_mask.sum() for t in self.trajectories))

  @property
  def sort_key(self) -> tuple[int, int]:
    return self.task_serial, self.sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """One training batch on the device.  Rows hold one or more trajectories, side by side.

  ``segment_ids`` is 0 for padding, else 1 + the index of the trajectory in the "N" arrays, unique in
  the global batch.  ``positions`` restart at 0 with each trajectory.  ``staleness`` is the version
  being trained minus the version that sampled the token (0 off actions).  ``discounts`` is γ, and 0
  at a trajectory's last action (that also keeps packed trajectories apart).  ``bootstrap`` is 1 at
  the last token of a trajectory whose truncation is bootstrapped, else 0.
  """

  tokens: Int32[Array, "B T"]
  positions: Int32[Array, "B T"]
  segment_ids: Int32[Array, "B T"]
  action_mask: Bool[Array, "B T"]
  loss_mask: Bool[Array, "B T"]
  value_mask: Bool[Array, "B T"]  # what the critic trains: actions whose target is known
  rollout_logprobs: Float32[Array, "B T"]
  staleness: Int32[Array, "B T"]
  temperature: Float32[Array, "B T"]
  rewards: Float32[Array, "B T"]
  discounts: Float32[Array, "B T"]
  bootstrap: Float32[Array, "B T"]
  num_actions: Int32[Array, "N"]
  returns: Float32[Array, "N"]
  group: Int32[Array, "N"]
  episode: Int32[Array, "N"]  # index of the episode in the batch; padding entries are -1
  baseline: Float32[Array, "N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Estimates:
  """What the losses need beside the batch.  ``anchor_logprobs`` = rollout_logprobs by default."""

  values: Float32[Array, "B T"]
  advantages: Float32[Array, "B T"]
  returns: Float32[Array, "B T"]
  anchor_logprobs: Float32[Array, "B T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelState:
  """One trained model: parameters (an ``nnx.State``), optimizer state, updates applied."""

  params: Any
  opt_state: Any
  step: Int32[Array, ""]
