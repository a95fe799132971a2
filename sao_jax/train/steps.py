"""The jitted steps: critic update, policy update, supervised update.  Averages are taken here.

Every average is a sum over the tokens of the *global* batch divided by a denominator that is
counted before the first micro-batch; micro-batches accumulate gradients of sums in float32.  Tokens
that the loss masks out of the gradient (DIS, clipping) stay in the denominator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sao_jax.config import Config, LossConfig
from sao_jax.kernels.losses import (
  cispo_loss,
  decoupled_ppo_loss,
  dis_loss,
  icepop_loss,
  ppo_loss,
  proximal_logprobs,
  value_loss,
)
from sao_jax.kernels.stats import explained_variance, masked_mean, masked_quantile
from sao_jax.models.transformer import policy_token_loss, token_logprobs, token_values
from sao_jax.optim import stop_frozen, trained_norm
from sao_jax.outcome import RunFailed
from sao_jax.train.estimates import Metrics, per_token
from sao_jax.types import Batch, Estimates, ModelState

TOKEN_LOGPROBS = "token_logprobs"


class Optimizer(NamedTuple):
  """A gradient transformation, the train/frozen label of each leaf, and where a state lives."""

  tx: optax.GradientTransformation
  labels: Any
  shardings: Any = None  # of the ModelState; None: wherever its arrays are


def token_weights(loss_mask: jax.Array, batch: Batch, average: str) -> jax.Array:
  """Weight of each token in the loss "B T": they sum to 1 over the batch (0 if nothing trains)."""
  mask = loss_mask.astype(jnp.float32)
  match average:
    case "token":
      return mask / jnp.maximum(mask.sum(), 1.0)
    case "episode":
      # a token's episode: padding (-1) falls into a bucket of its own
      size = len(batch.episode)
      episode = (
        jnp.where(batch.segment_ids > 0, per_token(batch.episode, batch.segment_ids), -1) + 1
      )
      tokens = jax.ops.segment_sum(mask.ravel(), episode.ravel(), size + 1)
      episodes = jnp.maximum((tokens[1:] > 0).sum(), 1)
      return mask / jnp.maximum(tokens[episode], 1.0) / episodes
    case other:
      raise ValueError(f"loss.average = {other!r}: choose one of token, episode")


def positive_weights(batch: Batch, config: LossConfig) -> jax.Array:
  """Weights "B T" of VAPO's −log π (arXiv 2504.05118): the mean over the tokens of good trajectories."""
  good = per_token(batch.returns, batch.segment_ids) > config.positive_above
  return token_weights(batch.loss_mask & good, batch, "token")


def policy_loss(config: LossConfig) -> Callable:
  """(logprobs "n", extras "n") → (weighted loss "n", aux "n"): the one match over losses."""

  def loss_fn(logprobs: jax.Array, extras: dict) -> tuple[jax.Array, Metrics]:
    rollout, advantages = extras["rollout_logprobs"], extras["advantages"]
    prox = jax.lax.stop_gradient(logprobs) if config.prox == "reuse" else extras["anchor_logprobs"]
    band = {"eps_low": config.eps_low, "eps_high": config.eps_high}
    most = config.max_behavior_weight or None
    match config.name:
      case "dis":
        loss, masked = dis_loss(logprobs, rollout, advantages, **band)
      case "ppo":
        loss, masked = ppo_loss(logprobs, prox, advantages, **band)
      case "cispo":
        loss, masked = cispo_loss(logprobs, prox, advantages, **band)
      case "decoupled_ppo":
        loss, masked = decoupled_ppo_loss(
          logprobs, prox, rollout, advantages, max_behavior_weight=most, **band
        )
      case "icepop":
        loss, masked = icepop_loss(
          logprobs, prox, rollout, advantages,
          min_behavior_weight=config.min_behavior_weight,
          max_behavior_weight=config.max_behavior_weight, **band,
        )  # fmt: skip
      case "a3po":
        prox = proximal_logprobs(
          logprobs, rollout, extras["staleness"], alpha_at_zero=config.alpha_at_zero
        )
        loss, masked = decoupled_ppo_loss(
          logprobs, prox, rollout, advantages, max_behavior_weight=most, **band
        )
      case other:
        raise ValueError(
          f"loss.name = {other!r}: choose one of dis, ppo, decoupled_ppo, a3po, cispo, icepop"
        )
    loss = loss * extras["weights"]
    if config.positive_nll:
      loss = loss - config.positive_nll * extras["positive_weights"] * logprobs
    aux = {"masked": masked.astype(jnp.float32)}
    if config.name in ("decoupled_ppo", "icepop", "a3po"):
      aux["behavior_weight"] = jnp.exp(jax.lax.stop_gradient(prox) - rollout)
    return loss, aux

  return loss_fn


def split_micro(tree: Any, parts: int) -> Any:
  """ "B …" → "A B/A …": micro-batch i is rows i mod A, so that each spans all data shards."""
  return jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1), tree
  )


def accumulate(gradient: Callable, params: Any, rows: Any, parts: int) -> tuple[Any, Metrics, Any]:
  """Sums gradient(params, rows) → (grads, sums, tokens "b T") over micro-batches in float32."""
  if parts == 1:
    return gradient(params, rows)

  def body(carry, micro):
    grads, sums, tokens = gradient(params, micro)
    grads = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), carry[0], grads)
    return (grads, jax.tree.map(jnp.add, carry[1], sums)), tokens

  micro = split_micro(rows, parts)
  first = jax.tree.map(lambda x: x[0], micro)
  shapes = jax.eval_shape(gradient, params, first)
  zeros = (
    jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes[0]),
    jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[1]),
  )
  (grads, sums), tokens = jax.lax.scan(body, zeros, micro)

  def join(x):
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])

  return grads, sums, jax.tree.map(join, tokens)


def apply_update(
  optimizer: Optimizer, state: ModelState, grads: Any, loss: jax.Array, tokens: jax.Array
) -> tuple[ModelState, Metrics]:
  """One optimizer step, unless the loss or gradient is not finite or no token trains.

  A finite gradient then gives a finite update: ``checks`` bounds the optimizer's settings.
  """
  norm = trained_norm(grads, optimizer.labels)
  finite = jnp.isfinite(loss) & jnp.isfinite(norm)
  apply = finite & (tokens > 0)

  def step(operands):
    grads, state = operands
    updates, opt_state = optimizer.tx.update(grads, state.opt_state, state.params)
    return ModelState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)

  state = jax.lax.cond(apply, step, lambda operands: operands[1], (grads, state))
  return state, {
    "loss": loss,
    "grad_norm": norm,
    "nonfinite": (~finite).astype(jnp.float32),
    "skipped": (~apply).astype(jnp.float32),
  }


class NonFinite(RunFailed):
  """A stage before RL whose loss or gradient is not finite: its updates are rejected."""


def require_finite(metrics: Metrics, name: str, where: str) -> None:
  """Raises NonFinite if the update was rejected; waits for it."""
  if float(metrics[f"{name}/nonfinite"]):
    raise NonFinite(
      f"{where}: the loss ({float(metrics[f'{name}/loss'])}) or its gradient (norm "
      f"{float(metrics[f'{name}/grad_norm'])}) is not finite; lower the stage's lr"
    )


def make_policy_step(config: Config, policy_def: nnx.GraphDef, optimizer: Optimizer) -> Callable:
  """policy_step(state (donated), batch, estimates) → (state, metrics).

  ``metrics[TOKEN_LOGPROBS]`` is "B T", of the actions, before the update; the rest are scalars.
  Loss: Σ_t w_t · loss(logprobs_t, …) with weights w that average over the whole batch.
  """
  loss_fn = policy_loss(config.loss)

  def gradient(params, rows):
    def loss(params):
      model = nnx.merge(policy_def, params)
      (total, tokens), router = policy_token_loss(
        model,
        rows["tokens"],
        rows["positions"],
        rows["segment_ids"],
        rows["temperature"],
        rows["action_mask"],
        rows["extras"],
        loss_fn,
      )
      return total, (tokens, router)

    (total, (tokens, router)), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return grads, {"loss": total, "router": router}, tokens

  def policy_step(
    state: ModelState, batch: Batch, estimates: Estimates
  ) -> tuple[ModelState, Metrics]:
    rows = {
      name: getattr(batch, name)
      for name in ("tokens", "positions", "segment_ids", "temperature", "action_mask")
    } | {
      "extras": {
        "advantages": estimates.advantages,
        "rollout_logprobs": batch.rollout_logprobs,
        "anchor_logprobs": estimates.anchor_logprobs,
        "staleness": batch.staleness,
        "weights": token_weights(batch.loss_mask, batch, config.loss.average),
        "positive_weights": positive_weights(batch, config.loss),
      }
    }
    parts = config.policy.micro_batches
    grads, sums, tokens = accumulate(gradient, state.params, rows, parts)
    trained = batch.loss_mask.sum()
    state, metrics = apply_update(optimizer, state, grads, sums["loss"], trained)
    router_sums: Any = sums["router"]
    router = {f"router/{k}": v / parts for k, v in router_sums.items()}
    metrics = {f"policy/{k}": v for k, v in metrics.items()} | router
    return state, metrics | ratio_metrics(tokens, batch) | {TOKEN_LOGPROBS: tokens["logprobs"]}

  return jax.jit(policy_step, donate_argnums=0, out_shardings=(optimizer.shardings, None))


def ratio_metrics(tokens: Metrics, batch: Batch) -> Metrics:
  """How far trainer and rollout are apart, split into d = 0 (numerics) and d > 0 (staleness)."""
  mask = batch.loss_mask
  log_ratio = jnp.where(mask, tokens["logprobs"] - batch.rollout_logprobs, 0.0)
  gap = jnp.abs(jnp.expm1(log_ratio))
  fresh, stale = mask & (batch.staleness == 0), mask & (batch.staleness > 0)
  quantiles = {
    f"ratio/q{q:02d}_{name}": jnp.exp(masked_quantile(log_ratio, here, q / 100))
    for name, here in (("fresh", fresh), ("stale", stale))
    for q in (1, 50, 99)
  }
  weight = tokens.get("behavior_weight")  # π_prox / π_rollout, of losses that weigh by it
  weights = {} if weight is None else {"ratio/behavior_max": jnp.where(mask, weight, 0.0).max()}
  return {
    **quantiles,
    **weights,
    "loss/masked": masked_mean(jnp.abs(tokens["masked"]), mask),
    "loss/masked_low": masked_mean((tokens["masked"] < 0).astype(jnp.float32), mask),
    "loss/masked_high": masked_mean((tokens["masked"] > 0).astype(jnp.float32), mask),
    "ratio/max_gap": jnp.where(mask, gap, 0.0).max(),
    "ratio/max_gap_fresh": jnp.where(fresh, gap, 0.0).max(),
    "ratio/mean_gap_fresh": masked_mean(gap, fresh),
    "ratio/mean_gap_stale": masked_mean(gap, stale),
    "ratio/kl": masked_mean(jnp.expm1(log_ratio) - log_ratio, mask),
    "policy/entropy": masked_mean(tokens["entropy"], batch.action_mask),
    "policy/trained_tokens": mask.sum().astype(jnp.float32),
  }


def make_critic_step(
  critic_def: nnx.GraphDef, optimizer: Optimizer, micro_batches: int = 1
) -> Callable:
  """critic_step(state (donated), batch, targets "B T") → (state, metrics).

  Loss: Σ (V − R)² ÷ number of value-mask tokens of the batch.  Frozen leaves get no gradient.
  """

  def gradient(params, rows):
    def loss(params):
      model = nnx.merge(critic_def, stop_frozen(params, optimizer.labels))
      values, _ = token_values(model, rows["tokens"], rows["positions"], rows["segment_ids"])
      return (value_loss(values, rows["targets"]) * rows["weights"]).sum(), values

    (total, values), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return grads, {"loss": total}, values

  def critic_step(
    state: ModelState, batch: Batch, targets: jax.Array
  ) -> tuple[ModelState, Metrics]:
    mask = batch.value_mask
    rows = {name: getattr(batch, name) for name in ("tokens", "positions", "segment_ids")}
    rows |= {
      "targets": jnp.where(mask, targets, 0.0),
      "weights": mask.astype(jnp.float32) / jnp.maximum(mask.sum(), 1),
    }
    grads, sums, values = accumulate(gradient, state.params, rows, micro_batches)
    state, metrics = apply_update(optimizer, state, grads, sums["loss"], mask.sum())
    metrics["fit_variance"] = explained_variance(values, targets, mask)
    return state, {f"critic/{k}": v for k, v in metrics.items()}

  return jax.jit(critic_step, donate_argnums=0, out_shardings=(optimizer.shardings, None))


def make_sft_step(
  policy_def: nnx.GraphDef, optimizer: Optimizer, aux_weight: float = 0.0
) -> Callable:
  """sft_step(state (donated), batch) → (state, metrics): mean −log π over ``loss_mask`` tokens."""

  def negative_logprob(logprobs, extras):
    return -logprobs * extras["weights"], {}

  def sft_step(state: ModelState, batch: Batch) -> tuple[ModelState, Metrics]:
    weights = token_weights(batch.loss_mask, batch, "token")

    def loss(params):
      model = nnx.merge(policy_def, params)
      (total, _), router = policy_token_loss(
        model,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        batch.temperature,
        batch.loss_mask,
        {"weights": weights},
        negative_logprob,
      )
      return total + aux_weight * router["aux_loss"], (total, router)

    (_, (nll, router)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    state, metrics = apply_update(optimizer, state, grads, nll, batch.loss_mask.sum())
    return state, {f"sft/{k}": v for k, v in metrics.items()} | {
      f"router/{k}": v for k, v in router.items()
    }

  return jax.jit(sft_step, donate_argnums=0, out_shardings=(optimizer.shardings, None))


def make_logprobs(policy_def: nnx.GraphDef) -> Callable:
  """logprobs(policy params, batch) → "B T" of the actions, at each token's temperature."""

  @jax.jit
  def logprobs(params: Any, batch: Batch) -> jax.Array:
    model = nnx.merge(policy_def, params)
    return token_logprobs(
      model,
      batch.tokens,
      batch.positions,
      batch.segment_ids,
      batch.temperature,
      batch.action_mask,
    )[0]

  return logprobs
