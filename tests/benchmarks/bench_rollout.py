"""Bar 16: what the Driver's threads cost over a bare loop of ``engine.generate``, batch mode."""

import asyncio

import numpy as np

from sao_jax.config import ModelConfig, RolloutConfig
from sao_jax.models.transformer import init_params
from sao_jax.rollout.client import InProcessClient
from sao_jax.rollout.engine import Prefix, RolloutEngine
from sao_jax.rollout.jetstream import RolloutDriver
from sao_jax.rollout.requests import RolloutRequest
from sao_jax.rollout.weights import WeightStore
from sao_jax.types import Sampling, Version
from tests.benchmarks.harness import Row, Timings, interleave

SLOTS, PROMPT = 32, 17
REFERENCE = ModelConfig(
  vocab_size=4096, d_model=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=512,
  num_experts=8, experts_per_token=2,
)  # fmt: skip
SMALL = ModelConfig(
  vocab_size=512, d_model=128, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, d_ff=256,
  num_experts=8, experts_per_token=2,
)  # fmt: skip


def _requests(tokens: int) -> list[RolloutRequest]:
  rng = np.random.default_rng(0)
  return [
    RolloutRequest(rng.integers(0, 512, PROMPT), Sampling(tokens, key=(0, i)), incarnation=0)
    for i in range(SLOTS)
  ]


def bare(engine: RolloutEngine, store: WeightStore, tokens: int) -> None:
  """Prefill, insert, generate, and the result on the host one step behind: no threads, no queue."""
  engine.reset()
  state = engine.init_decode_state()
  for slot, request in enumerate(_requests(tokens)):
    prefix: Prefix = engine.prefill(params=store, padded_tokens=request, true_length=PROMPT)
    state = engine.insert(prefix, state, slot)
  before = None
  for _ in range(tokens):
    state, result = engine.generate(store, state)
    result.copy_to_host_async()
    if before is not None:
      np.asarray(before.data)
    before = result
  np.asarray(before.data)


def through_driver(client: InProcessClient, tokens: int) -> None:
  async def one(request: RolloutRequest) -> None:
    async with client.session("bench") as session:
      await session.extend(request.prefill_content)
      completion = await session.sample(request.sampling)
      assert len(completion.tokens) == tokens

  async def everything() -> None:
    await asyncio.gather(*[one(request) for request in _requests(tokens)])

  asyncio.run(everything())


def _measure(model: ModelConfig, tokens: int, rounds: int) -> Timings:
  rollout = RolloutConfig(slots=SLOTS, max_len=128, prefix_cache_mb=0)
  store = WeightStore(init_params(model, 0)[1], Version(0, 0))
  loop, served = RolloutEngine(model, rollout, store), RolloutEngine(model, rollout, store)
  with RolloutDriver(served, store) as driver:
    client = InProcessClient(driver)
    return interleave(
      {"driver": lambda: through_driver(client, tokens), "bare": lambda: bare(loop, store, tokens)},
      rounds=rounds,
    )


def rows(quick: bool) -> list[Row]:
  tokens, rounds = (100, 3) if quick else (100, 9)
  result = []
  for name, model in (("15.5M MoE", REFERENCE), ("0.9M MoE", SMALL)):
    timings = _measure(model, tokens, rounds)
    judged = model is REFERENCE
    extra = 1e3 * (timings.median("driver") - timings.median("bare")) / tokens
    result.append(
      Row(
        bar="16",
        measure=f"Driver, batch mode, {SLOTS} slots, {name}, per token step",
        ours=timings.median("driver") / tokens,
        peer="bare generate loop",
        theirs=timings.median("bare") / tokens,
        ratio=timings.ratio("driver", "bare"),
        must=1.10 if judged else None,
        excellent=1.05 if judged else None,
        limit="for steps of 5 ms or more",
        note=f"{extra:+.2f} ms a step, filling and emptying the slots included",
      )
    )
  return result
