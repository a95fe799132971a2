"""Bars 1, 2, 3, 10, 13: advantages, the sampler, the DIS loss.  Each peer is checked for parity."""

import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.kernels.advantages import batched_skip_observation_gae
from sao_jax.kernels.losses import dis_loss
from sao_jax.kernels.stats import whitened
from sao_jax.rollout.sampling import sample
from tests.benchmarks.harness import Row, blocking, interleave, missing, peer

GAMMA, LAMBDA = 0.99, 0.95


def rows(quick: bool = False) -> list[Row]:
  """Bars 1, 2, 3 (advantages), 10 (sampling), 13 (DIS)."""
  rounds = 3 if quick else 11
  return [
    *advantage_rows("1", (128, 8192), 1 / 35, 1 / 42, rounds),
    *advantage_rows("2", (8, 131072), 1 / 500, 1 / 991, rounds),
    *numba_rows((128, 8192), rounds),
    *sampling_rows((32, 151936), rounds),
    *dis_rows((128, 8192), rounds),
  ]


def import_module_alone(name: str) -> types.ModuleType:
  """Imports one module of a package without running the ``__init__`` of the packages above it.

  Those pull in optional dependencies that the one function compared here does not use.
  """
  parents = name.split(".")[:-1]
  for depth in range(1, len(parents) + 1):
    package = ".".join(parents[:depth])
    if package in sys.modules:
      continue
    module = types.ModuleType(package)
    if depth == 1:
      spec = importlib.util.find_spec(package)
      if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
      module.__path__ = list(spec.submodule_search_locations)
    else:
      above = sys.modules[".".join(parents[: depth - 1])]
      module.__path__ = [str(pathlib.Path(above.__path__[0]) / parents[depth - 1])]
    sys.modules[package] = module
  return importlib.import_module(name)


def check(ours: object, theirs: object, name: str, tolerance: float = 2e-3) -> None:
  """Raises unless both sides computed the same thing; a benchmark of something else is void."""
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  error = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
  if not error <= tolerance:
    raise AssertionError(f"ours and {name} differ by {error:.2e} (allowed {tolerance:.0e})")


# --- Advantages ---


def advantage_case(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Rewards, values and a mask of runs of 64 tokens."""
  rng = np.random.default_rng(0)
  batch, length = shape
  rewards, values = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
  mask = (rng.random((batch, length // 64)) < 0.5).repeat(64, 1)
  return rewards, values, mask


@jax.jit
def whitened_advantages(rewards, values, discounts, mask):
  """Whitened advantages, and returns."""
  advantages = batched_skip_observation_gae(rewards, values, discounts, mask, LAMBDA)
  return whitened(advantages, mask), advantages + values


def advantage_rows(
  bar: str, shape: tuple[int, int], must: float, excellent: float, rounds: int
) -> list[Row]:
  rewards, values, mask = advantage_case(shape)
  weights = mask.astype(np.float32)
  discounts = np.full(shape, GAMMA, np.float32)
  ours = blocking(whitened_advantages, *map(jnp.asarray, (rewards, values, discounts, mask)))
  advantages, returns = ours()
  measure = f"skip-observation GAE + returns + whitening {list(shape)}"
  limit = "3 reads, 2 writes of B·T"
  out = []

  def compare(name: str, theirs: Callable, rounds: int, must: float, excellent: float) -> None:
    theirs_advantages, theirs_returns = theirs()
    check(advantages, np.asarray(theirs_advantages) * weights, name)
    check(np.asarray(returns) * weights, np.asarray(theirs_returns) * weights, name)
    times = interleave({"ours": ours, "theirs": peer(theirs)}, rounds=rounds, warmup=1)
    seconds = times.median("ours"), times.median("theirs")
    ratio = times.ratio("ours", "theirs")
    out.append(Row(bar, measure, seconds[0], "s", name, seconds[1], ratio, must, excellent, limit))

  def without(name: str, error: ImportError, must: float) -> None:
    seconds = interleave({"ours": ours}, rounds=rounds).median("ours")
    note = missing(name, error)
    out.append(Row(bar, measure, seconds, "s", name, must=must, limit=limit, note=note))

  try:
    tunix = import_module_alone("tunix.rl.algo_core").compute_gae_advantages
  except ImportError as error:
    without("tunix", error, 0.75)
  else:
    args = [*map(jnp.asarray, (rewards, values, weights)), GAMMA, LAMBDA]
    compare("tunix", blocking(tunix, *args), rounds, 0.75, 0.60)
  try:
    verl = import_module_alone("verl.trainer.ppo.core_algos").compute_gae_advantage_return
  except ImportError as error:
    without("verl", error, must)
  else:
    import torch

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(x) for x in (rewards, values, weights)]
    compare("verl", lambda: verl(*tensors, GAMMA, LAMBDA), 1, must, excellent)
  return out


def numba_rows(shape: tuple[int, int], rounds: int) -> list[Row]:
  rewards, values, mask = advantage_case(shape)
  discounts = np.full(shape, GAMMA, np.float32)
  function = jax.jit(batched_skip_observation_gae)
  ours = blocking(function, *map(jnp.asarray, (rewards, values, discounts, mask)), LAMBDA)
  measure = f"skip-observation GAE {list(shape)}"
  try:
    import numba
  except ImportError as error:
    seconds = interleave({"ours": ours}, rounds=rounds).median("ours")
    return [Row("3", measure, seconds, "s", "numba", must=6.0, note=missing("numba", error))]

  @numba.njit
  def loop(rewards, values, discounts, mask, lambda_):
    out = np.zeros_like(rewards)
    for row in range(rewards.shape[0]):
      next_value = next_advantage = np.float32(0)
      for t in range(rewards.shape[1] - 1, -1, -1):
        if mask[row, t]:
          discount = discounts[row, t]
          delta = rewards[row, t] + discount * next_value - values[row, t]
          next_advantage = delta + discount * lambda_ * next_advantage
          next_value = values[row, t]
          out[row, t] = next_advantage
    return out

  def theirs():
    return loop(rewards, values, discounts, mask, np.float32(LAMBDA))

  check(ours(), theirs(), "numba")
  times = interleave({"ours": ours, "theirs": peer(theirs)}, rounds=rounds)
  seconds = times.median("ours"), times.median("theirs")
  limit = "the loop a C compiler makes"
  ratio = times.ratio("ours", "theirs")
  return [Row("3", measure, seconds[0], "s", "numba", seconds[1], ratio, 6.0, 3.0, limit)]


# --- Sampling ---


def sampling_rows(shape: tuple[int, int], rounds: int) -> list[Row]:
  batch, vocabulary = shape
  logits = (2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
  ones, zeros = jnp.ones(batch), jnp.zeros(batch, jnp.int32)
  uniform = jax.random.uniform(jax.random.key(0), (batch,))
  function = jax.jit(sample)
  ours = blocking(function, jnp.asarray(logits), uniform, ones, zeros, ones)
  truncated = blocking(function, jnp.asarray(logits), uniform, ones, zeros + 50, 0.9 * ones)
  measure = f"sample + log-prob {list(shape)}"
  limit = f"2 reads of {batch * vocabulary * 4 / 1e6:.0f} MB"
  cut = interleave({"cut": truncated}, rounds=3, warmup=1).median("cut")
  extra = Row("10", f"the same with top-k 50, top-p .9 {list(shape)}", cut)
  try:
    import torch
  except ImportError as error:
    seconds = interleave({"ours": ours}, rounds=rounds).median("ours")
    note = missing("torch", error)
    return [Row("10", measure, seconds, "s", "torch", must=0.5, limit=limit, note=note), extra]
  torch.set_num_threads(1)
  tensor = torch.from_numpy(logits)

  def theirs():
    logprobs = torch.log_softmax(tensor, -1)
    tokens = torch.multinomial(logprobs.exp(), 1)
    return tokens, logprobs.gather(1, tokens)

  tokens, logprobs, _ = function(jnp.asarray(logits), uniform, ones, zeros, ones)
  chosen = torch.from_numpy(np.array(tokens)).long()[:, None]
  expected = torch.log_softmax(tensor, -1).gather(1, chosen)
  check(logprobs, expected[:, 0], "torch", 1e-5)
  times = interleave({"ours": ours, "theirs": peer(theirs)}, rounds=rounds)
  seconds = times.median("ours"), times.median("theirs")
  ratio = times.ratio("ours", "theirs")
  name = "torch softmax + multinomial"
  return [Row("10", measure, seconds[0], "s", name, seconds[1], ratio, 0.5, 0.06, limit), extra]


# --- DIS ---


@jax.jit
def dis_step(logprobs, rollout_logprobs, advantages, weights):
  """The loss and its gradient by the log-probs; the weights of the tokens sum to 1."""

  def weighted(logprobs):
    loss, _ = dis_loss(logprobs, rollout_logprobs, advantages, eps_low=0.3, eps_high=5.0)
    return (loss * weights).sum()

  return jax.value_and_grad(weighted)(logprobs)


@jax.jit
def product_step(logprobs, rollout_logprobs, advantages, weights):
  """The same reads and writes without exponential and band: what memory allows."""

  def weighted(logprobs):
    gap = jax.lax.stop_gradient(logprobs) - rollout_logprobs
    return (-gap * advantages * logprobs * weights).sum()

  return jax.value_and_grad(weighted)(logprobs)


def dis_rows(shape: tuple[int, int], rounds: int) -> list[Row]:
  rng = np.random.default_rng(0)
  tokens = shape[0] * shape[1]
  logprobs = (-1.5 + rng.standard_normal(shape)).astype(np.float32)
  rollout = (logprobs + 0.3 * rng.standard_normal(shape)).astype(np.float32)
  advantages = rng.standard_normal(shape).astype(np.float32)
  mask = rng.random(shape) < 0.6
  weights = (mask / mask.sum()).astype(np.float32)
  arrays = tuple(map(jnp.asarray, (logprobs, rollout, advantages, weights)))
  ours = blocking(dis_step, *arrays)
  _, gradient = ours()
  measure = f"DIS loss + gradient {list(shape)}, per token"
  floor = interleave({"floor": blocking(product_step, *arrays)}, rounds=rounds).median("floor")
  limit = f"{floor / tokens * 1e9:.3g} ns without exp and band"
  bars = {"must": 5.0, "excellent": 3.0, "limit": limit, "judge": "ours"}
  try:
    import torch
  except ImportError as error:
    nanoseconds = interleave({"ours": ours}, rounds=rounds).median("ours") / tokens * 1e9
    note = missing("torch", error)
    return [Row("13", measure, nanoseconds, "ns", "torch eager", note=note, **bars)]
  torch.set_num_threads(1)
  lp, old, adv, share = map(torch.from_numpy, (logprobs.copy(), rollout, advantages, weights))
  lp.requires_grad_()

  def theirs():
    lp.grad = None
    ratio = (lp.detach() - old).exp()
    inside = (ratio > 0.7) & (ratio < 6.0)
    loss = torch.where(inside, ratio, torch.zeros_like(ratio)) * adv * lp * share
    (-loss.sum()).backward()
    return lp.grad

  check(gradient, theirs(), "torch")
  times = interleave({"ours": ours, "theirs": peer(theirs)}, rounds=rounds)
  seconds = [times.median(name) / tokens * 1e9 for name in ("ours", "theirs")]
  ratio = times.ratio("ours", "theirs")
  return [Row("13", measure, seconds[0], "ns", "torch eager", seconds[1], ratio, **bars)]
