"""Advantages: GAE that skips observations, per token or per turn; group-relative; running mean.

Kernels take one sequence and the caller vmaps; ``batched_skip_observation_gae`` is the same kernel
over rows, faster on CPU than its vmap.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

Scalar = float | int | Float[Array, ""]
Carry = tuple[jax.Array, jax.Array]  # value and advantage of the next action

TILE_ROWS = 8  # one vector register
TILE_COLUMNS = 2048  # a tile of every array stays in the cache


def _scan(
  rewards: jax.Array,
  values: jax.Array,
  discounts: jax.Array,
  mask: jax.Array,
  lambdas: jax.Array,
  carry: Carry | None = None,
) -> tuple[Carry, jax.Array]:
  """GAE along the leading axis, in reverse: (carry, advantages).

  The carry is (V, Â) of the next action; an observation leaves it as it is.  The mask enters by
  arithmetic, not by a select, which XLA turns into a branch per token on CPU.  One carry would do
  (V + λÂ), but it rounds on the scale of V and stands still once λ is near 1, where δ is exact.
  """
  rewards, values, discounts = (jnp.where(mask, x, 0.0) for x in (rewards, values, discounts))
  skips = jnp.where(mask, 0.0, 1.0).astype(rewards.dtype)
  per_token = lambdas.ndim > 0
  if per_token:
    lambdas = jnp.where(mask, lambdas, 0.0)

  def step(carry, x):
    next_value, next_advantage = carry
    reward, value, discount, skip = x[:4]
    decay = discount * (x[4] if per_token else lambdas) + skip
    advantage = reward + (discount * next_value - value) + decay * next_advantage
    return (skip * next_value + value, advantage), advantage

  zero = jnp.zeros(rewards.shape[1:], rewards.dtype)
  inputs = (rewards, values, discounts, skips) + ((lambdas,) if per_token else ())
  last, advantages = lax.scan(step, carry or (zero, zero), inputs, reverse=True)
  return last, jnp.where(mask, advantages, 0.0)


def _tiled(
  rewards: jax.Array,
  values: jax.Array,
  discounts: jax.Array,
  mask: jax.Array,
  lambdas: jax.Array,
) -> jax.Array:
  """GAE of rows "B T", tile by tile, for CPU.

  A step of the scan wants the tokens of one time side by side, and transposing whole batches costs
  more than the scan.  A tile of 8 rows is transposed inside the cache, and its steps are small
  enough for XLA to compile the loop into one function.
  """
  batch, length = rewards.shape
  rows = max(1, min(batch, TILE_ROWS))
  chunks = max(1, -(-length // TILE_COLUMNS))
  columns = -(-length // chunks)
  padding = ((0, -batch % rows), (0, chunks * columns - length))
  inputs = [rewards, values, discounts, mask] + ([lambdas] if lambdas.ndim else [])
  if padding != ((0, 0), (0, 0)):
    inputs = [jnp.pad(x, padding) for x in inputs]

  def tile(i, state):
    carry, advantages = state
    chunk = chunks - 1 - i % chunks
    corner = (i // chunks * rows, chunk * columns)
    carry = jax.tree.map(lambda x: jnp.where(chunk == chunks - 1, 0.0, x), carry)
    parts = [lax.dynamic_slice(x, corner, (rows, columns)).T for x in inputs]
    r, v, g, m = parts[:4]
    carry, part = _scan(r, v, g, m, parts[4] if lambdas.ndim else lambdas, carry)
    return carry, lax.dynamic_update_slice(advantages, part.T, corner)

  zero = jnp.zeros(rows, rewards.dtype)
  tiles = inputs[0].shape[0] // rows * chunks
  init = (zero, zero), jnp.zeros(inputs[0].shape, rewards.dtype)
  return lax.fori_loop(0, tiles, tile, init)[1][:batch, :length]


def _associative(
  rewards: jax.Array,
  values: jax.Array,
  discounts: jax.Array,
  mask: jax.Array,
  lambdas: jax.Array,
) -> jax.Array:
  """The same in O(log T) steps, for accelerators: a scan of T trips is bound by its latency."""
  rewards, values, discounts = (jnp.where(mask, x, 0.0) for x in (rewards, values, discounts))

  def first(later, earlier):
    return later[0] | earlier[0], jnp.where(earlier[0], earlier[1], later[1])

  _, first_value = lax.associative_scan(first, (mask, values), reverse=True)
  next_value = jnp.concatenate([first_value[1:], jnp.zeros_like(first_value[:1])])
  delta = rewards + (discounts * next_value - values)
  decay = jnp.where(mask, discounts * jnp.where(mask, lambdas, 0.0), 1.0)

  def compose(later, earlier):
    return earlier[0] * later[0], earlier[1] + earlier[0] * later[1]

  advantages = lax.associative_scan(compose, (decay, delta), reverse=True)[1]
  return jnp.where(mask, advantages, 0.0)


def skip_observation_gae(
  rewards: Float[Array, "T"],
  values: Float[Array, "T"],
  discounts: Float[Array, "T"],
  action_mask: Bool[Array, "T"],
  lambda_: Scalar | Float[Array, "T"] = 1.0,
) -> Float[Array, "T"]:
  """Generalised advantage estimation on the action tokens, observations cut out.

  With t' the next action token after t (SAO, arXiv 2607.07508; GAE, arXiv 1506.02438)::

      δ_t = r_t + γ_t V_t' - V_t            Â_t = δ_t + γ_t λ_t Â_t'

  One factor γλ bridges an observation, however long it is.

  Args:
    rewards: r_t, on action tokens.
    values: V(tokens before t), the baseline of token t.
    discounts: γ_t, in [0, 1]; 0 at a trajectory's last action, which also keeps trajectories that
      are packed into one row apart.
    action_mask: tokens the policy sampled.  Anything elsewhere, NaN included, is ignored.
    lambda_: λ, one or per token.

  Returns:
    Advantages; 0 where not an action.
  """
  lambdas = jnp.asarray(lambda_, rewards.dtype)

  def scan(*args):
    return _scan(*args)[1]

  args = rewards, values, discounts, action_mask, lambdas
  return lax.platform_dependent(*args, cpu=scan, default=_associative)


def batched_skip_observation_gae(
  rewards: Float[Array, "B T"],
  values: Float[Array, "B T"],
  discounts: Float[Array, "B T"],
  action_mask: Bool[Array, "B T"],
  lambda_: Scalar | Float[Array, "B T"] = 1.0,
) -> Float[Array, "B T"]:
  """``skip_observation_gae`` of each row: the same values, on CPU faster than its vmap."""
  lambdas = jnp.asarray(lambda_, rewards.dtype)
  associative = jax.vmap(_associative, in_axes=(0, 0, 0, 0, 0 if lambdas.ndim else None))
  args = rewards, values, discounts, action_mask, lambdas
  return lax.platform_dependent(*args, cpu=_tiled, default=associative)


def step_level_gae(
  rewards: Float[Array, "T"],
  values: Float[Array, "T"],
  discounts: Float[Array, "T"],
  action_mask: Bool[Array, "T"],
  lambda_: Scalar | Float[Array, "T"] = 1.0,
  *,
  reduce: str = "last",
) -> Float[Array, "T"]:
  """GAE over turns: a turn is a maximal run of action tokens and counts as one step.

  A turn's reward is the sum over its tokens, its value that of its last token (``"last"``) or the
  mean (``"mean"``), its γ and λ those of its last token; its advantage goes to all its tokens.

  Args:
    rewards, values, discounts, action_mask, lambda_: as in ``skip_observation_gae``.
    reduce: ``"last"`` or ``"mean"``.

  Returns:
    Advantages; 0 where not an action.

  Raises:
    ValueError: another ``reduce``.
  """
  if reduce not in ("last", "mean"):
    raise ValueError(f"reduce = {reduce!r}: choose one of last, mean")
  length = len(rewards)
  no_action = jnp.zeros((1,), bool)
  start = action_mask & ~jnp.concatenate([no_action, action_mask[:-1]])
  end = action_mask & ~jnp.concatenate([action_mask[1:], no_action])
  turn = jnp.cumsum(start)  # 1, 2, …; read only at action tokens

  def per_turn(x):
    sums = jax.ops.segment_sum(jnp.where(action_mask, x, 0.0), turn, length + 1)
    return sums[turn]

  turn_values = values
  if reduce == "mean":
    count = jnp.maximum(per_turn(jnp.ones_like(values)), 1.0)
    turn_values = per_turn(values) / count
  advantages = skip_observation_gae(per_turn(rewards), turn_values, discounts, end, lambda_)
  return jnp.where(action_mask, per_turn(advantages), 0.0)


def length_adaptive_lambda(num_actions: Int[Array, "*n"], alpha: float = 1.5) -> Float[Array, "*n"]:
  """λ = 1 - 1 / (α l) of a trajectory of l action tokens, kept in [0, 1] (VAPO, arXiv 2504.05118).

  Keep it in float32: bfloat16 rounds it to 1 from l = 342 on.
  """
  return 1.0 - 1.0 / jnp.maximum(alpha * num_actions.astype(jnp.float32), 1.0)


def group_relative(
  returns: Float[Array, "N"],
  group: Int[Array, "N"],
  num_groups: int,
  *,
  scale: str = "std",
  eps: float = 1e-6,
) -> Float[Array, "N"]:
  """Return minus the mean of its group, over the group's standard deviation (arXiv 2402.03300).

  Args:
    returns: one return per episode.
    group: index of the episode's group, in [0, num_groups); entries outside it get 0.
    num_groups: how many groups there are.
    scale: ``"std"`` divides by (population standard deviation + eps), ``"none"`` does not
      (arXiv 2503.20783).
    eps: keeps the quotient finite when all returns of a group are equal.

  Returns:
    Advantage of each episode; a group of one gives 0.

  Raises:
    ValueError: another ``scale``.
  """
  if scale not in ("std", "none"):
    raise ValueError(f"scale = {scale!r}: choose one of std, none")
  inside = (group >= 0) & (group < num_groups)
  index = jnp.where(inside, group, num_groups)

  def mean(x):
    sums = jax.ops.segment_sum(x, index, num_groups + 1)
    sizes = jax.ops.segment_sum(jnp.ones_like(x), index, num_groups + 1)
    return (sums / jnp.maximum(sizes, 1.0))[index]

  centred = returns - mean(returns)
  if scale == "std":
    centred = centred / (jnp.sqrt(mean(jnp.square(centred))) + eps)
  return jnp.where(inside, centred, 0.0)


def running_mean_baseline(
  returns: Float[Array, "N"],
  prompt_window: Float[Array, "N W"],
  prompt_count: Int[Array, "N"],
  run_window: Float[Array, "M"],
  run_count: Int[Array, ""],
) -> Float[Array, "N"]:
  """Baseline of each episode from returns of earlier batches.

  The mean of the prompt's own window; if that is empty, the mean over the run; if that is empty
  too, the episode's own return, so that its advantage is 0.  A baseline per run is this with
  ``prompt_count = 0``.

  Args:
    returns: one return per episode of this batch.
    prompt_window: earlier returns of the same prompt; the first ``prompt_count`` are filled.
    prompt_count: how many of W are filled.
    run_window: earlier returns of all prompts; the first ``run_count`` are filled.
    run_count: how many of M are filled.

  Returns:
    Baselines.
  """

  def window_mean(window, count):
    filled = jnp.arange(window.shape[-1]) < count
    return jnp.where(filled, window, 0.0).sum() / jnp.maximum(count, 1)

  own = jax.vmap(window_mean)(prompt_window, prompt_count)
  fallback = jnp.where(run_count > 0, window_mean(run_window, run_count), returns)
  return jnp.where(prompt_count > 0, own, fallback)
