"""A tiny policy, its references by a plain full forward, and small helpers for rollout tests."""

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sao_jax.config import ModelConfig, RolloutConfig
from sao_jax.models.transformer import hidden_states, init_params
from sao_jax.rollout.client import Session
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.sampling import sample, token_uniform
from sao_jax.rollout.weights import WeightStore
from sao_jax.types import Completion, Sampling, Version

MAX_LEN = 96
MODEL = ModelConfig(
  vocab_size=80, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32,
  num_experts=4, experts_per_token=2,
)  # fmt: skip


@functools.cache
def weights(seed: int = 0):
  """Sharp enough that a wrong weight or a wrong temperature shows, and no sharper: rounding grows
  with the logits, and at twice the weights two float32 forwards are 1.2e-5 apart."""
  graphdef, params = init_params(MODEL, seed)
  return graphdef, jax.tree.map(lambda x: x * 1.5 if x.ndim > 2 else x, params)


def params_of(seed: int = 0):
  return weights(seed)[1]


def rollout_config(**changes) -> RolloutConfig:
  return RolloutConfig(**{"slots": 4, "max_len": MAX_LEN, **changes})


def make_engine(kind: type[RolloutEngine] = RolloutEngine, **changes) -> RolloutEngine:
  """An engine of the tiny model with weights of seed 0 as version (0, 0)."""
  return kind(MODEL, rollout_config(**changes), WeightStore(params_of(0), Version(0, 0)))


@contextlib.contextmanager
def serving(
  kind: type[RolloutEngine] = RolloutEngine, max_queued: int = 256, **changes
) -> Iterator[RolloutDriver]:
  engine = make_engine(kind, **changes)
  with RolloutDriver(engine, engine.store, max_queued=max_queued) as driver:
    yield driver


@functools.cache
def _forward():
  graphdef, _ = weights(0)

  @jax.jit
  def logits(params, tokens):
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(MAX_LEN)[None]
    hidden, _ = hidden_states(model, tokens[None], positions, jnp.ones_like(tokens)[None])
    return hidden[0].astype(jnp.float32) @ model.head[...]

  return logits


def full_logits(tokens: Sequence[int], params) -> np.ndarray:
  """Logits of a plain forward of the whole sequence, [len(tokens), V]."""
  padded = np.zeros(MAX_LEN, np.int32)
  padded[: len(tokens)] = tokens
  return np.asarray(_forward()(params, padded))[: len(tokens)]


def reference_logprobs(
  context: Sequence[int], tokens: Sequence[int], temperature: float, params
) -> np.ndarray:
  """log π(token | what is before it) by a plain forward of context + tokens."""
  everything = [*context, *tokens]
  logits = full_logits(everything, params) / temperature
  logprobs = np.asarray(jax.nn.log_softmax(logits, -1))
  rows = np.arange(len(context) - 1, len(everything) - 1)
  return logprobs[rows, np.asarray(tokens)]


@functools.cache
def _draw():
  return jax.jit(
    lambda logits, key, index, t, k, p: sample(
      logits, token_uniform(jnp.broadcast_to(key, (index.shape[0], 2)), index), t, k, p
    )
  )


def reference_tokens(
  context: Sequence[int], tokens: Sequence[int], sampling: Sampling, params
) -> np.ndarray:
  """What a plain sampler draws at each position, given the tokens before it.

  Equal to ``tokens`` at every position exactly if the plain sampler would produce ``tokens``.
  """
  everything = [*context, *tokens]
  n, total = len(context), len(everything)
  logits = np.zeros((MAX_LEN, MODEL.vocab_size), np.float32)  # one shape, one compilation
  logits[: total - n] = full_logits(everything, params)[n - 1 : total - 1]
  index = np.arange(n, n + MAX_LEN, dtype=np.int32)
  ones = np.ones(MAX_LEN, np.float32)
  drawn, _, _ = _draw()(
    logits, np.asarray(sampling.key, np.uint32), index, sampling.temperature * ones,
    np.full(MAX_LEN, sampling.top_k, np.int32), sampling.top_p * ones,
  )  # fmt: skip
  return np.asarray(drawn)[: total - n]


@dataclass
class Job:
  """A prompt and how to continue it."""

  prompt: list[int]
  sampling: Sampling


def jobs(
  n: int, *, seed: int = 0, longest_prompt: int = 50, longest_answer: int = 40, temperatures=(1.0,),
  stops: int = 1,
) -> list[Job]:  # fmt: skip
  rng = np.random.default_rng(seed)
  result = []
  for i in range(n):
    prompt = rng.integers(0, MODEL.vocab_size, rng.integers(1, longest_prompt + 1)).tolist()
    sampling = Sampling(
      max_new_tokens=int(rng.integers(1, longest_answer + 1)),
      temperature=float(temperatures[i % len(temperatures)]),
      stop_ids=tuple(rng.integers(0, MODEL.vocab_size, stops).tolist()),
      key=(seed, i),
    )
    result.append(Job(prompt, sampling))
  return result


async def run_job(client, job: Job, name: str = "job") -> Completion:
  async with client.session(name) as session:
    await session.extend(job.prompt)
    return await session.sample(job.sampling)


def run_jobs(client, todo: Sequence[Job], *, return_exceptions: bool = False) -> list:
  async def everything():
    calls = [run_job(client, job, f"job{i}") for i, job in enumerate(todo)]
    return await asyncio.gather(*calls, return_exceptions=return_exceptions)

  return asyncio.run(everything())


def check_job(job: Job, completion: Completion, params, tolerance: float = 1e-5) -> None:
  """Tokens exactly, log-probs to ``tolerance``, and that the sample ends where it should."""
  tokens = completion.tokens.tolist()
  sampling = job.sampling
  assert reference_tokens(job.prompt, tokens, sampling, params).tolist() == tokens
  expected = reference_logprobs(job.prompt, tokens, sampling.temperature or 1.0, params)
  assert np.abs(expected - completion.logprobs).max() <= tolerance
  assert not set(tokens[:-1]) & set(sampling.stop_ids)
  if completion.stop == "stop":
    assert tokens[-1] in sampling.stop_ids
  else:
    room = MAX_LEN - len(job.prompt)
    assert len(tokens) == min(sampling.max_new_tokens, room)


@dataclass
class Transcript:
  """A whole session: where each sampled piece stands in the sequence."""

  tokens: list[int] = field(default_factory=list)
  pieces: list[tuple[int, Completion]] = field(default_factory=list)

  async def extend(self, session: Session, tokens: Sequence[int]) -> None:
    await session.extend(tokens)
    self.tokens += tokens

  async def sample(self, session: Session, sampling: Sampling) -> Completion:
    completion = await session.sample(sampling)
    self.pieces.append((len(self.tokens), completion))
    self.tokens += completion.tokens.tolist()
    return completion

  def worst(self, params_of_version) -> float:
    """Largest difference of a recorded log-prob from a plain forward under the token's version."""
    worst = 0.0
    for start, piece in self.pieces:
      for version in sorted(set(piece.policy_version.tolist())):
        expected = reference_logprobs(
          self.tokens[:start], piece.tokens.tolist(), piece.temperature, params_of_version(version)
        )
        mine = piece.policy_version == version
        worst = max(worst, float(np.abs(expected - piece.logprobs)[mine].max()))
    return worst


async def play(
  client, name: str, *, turns: int = 4, temperature: float = 1.0, pause: float = 0.0, seed: int = 0
) -> Transcript:
  """A multi-turn episode with observations of random length."""
  rng = np.random.default_rng([seed, *name.encode()])
  pauses = iter(np.random.default_rng().random(turns))
  transcript = Transcript()
  async with client.session(name) as session:
    await transcript.extend(session, rng.integers(0, MODEL.vocab_size, 20).tolist())
    for _ in range(turns):
      sampling = Sampling(8, temperature, stop_ids=(3,), key=(seed, int(rng.integers(2**31))))
      await transcript.sample(session, sampling)
      await asyncio.sleep(pause * next(pauses))
      observation = rng.integers(0, MODEL.vocab_size, rng.integers(1, 12)).tolist()
      await transcript.extend(session, observation)
  return transcript
