"""The training forward: causality, packing, the shift, temperature, critic, precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sao_jax.config import ModelConfig
from sao_jax.models import transformer

CONFIG = ModelConfig(
  vocab_size=32, d_model=16, num_layers=2, head_dim=8, d_ff=16, moe_block_train=8
)
T = 12


@pytest.fixture(scope="module")
def policy():
  return transformer.init_params(CONFIG, 0)


def _row(*lengths):
  """Positions and segment ids of trajectories of these lengths in one row of T."""
  positions, segments = np.zeros((1, T), np.int32), np.zeros((1, T), np.int32)
  at = 0
  for i, n in enumerate(lengths):
    positions[0, at : at + n], segments[0, at : at + n] = np.arange(n), i + 1
    at += n
  return jnp.asarray(positions), jnp.asarray(segments)


def _logprobs(graphdef, params, tokens, positions, segments, temperature=1.0, mask=None):
  mask = segments > 0 if mask is None else mask
  model = nnx.merge(graphdef, params)
  temperature = jnp.full(tokens.shape, temperature)
  return transformer.token_logprobs(model, tokens, positions, segments, temperature, mask)


logprobs = jax.jit(_logprobs, static_argnums=0)


def test_the_future_has_exactly_zero_gradient(policy):
  graphdef, params = policy
  tokens = jnp.arange(T)[None]  # all different, so that a row of embed is a position
  positions, segments = _row(5, 7)

  @jax.jit
  def gradient(weights):
    def f(params):
      model = nnx.merge(graphdef, params)
      hidden, _ = transformer.hidden_states(model, tokens, positions, segments)
      return (hidden * weights[..., None]).sum()

    return jax.grad(f)(params)["embed"][...]

  for t in (0, 3, 4, 5, 9):
    seen = np.asarray(gradient(jnp.zeros((1, T)).at[0, t].set(1.0))).any(1)[:T]
    want = (np.arange(T) <= t) & (np.asarray(segments)[0] == segments[0, t])
    np.testing.assert_array_equal(seen, want)


def test_packed_equals_padded_equals_alone(policy):
  graphdef, params = policy
  tokens = jax.random.randint(jax.random.key(1), (1, T), 0, 32)
  packed, entropy = logprobs(graphdef, params, tokens, *_row(5, 7))
  for start, n in ((0, 5), (5, 7)):
    alone = jnp.zeros((1, T), jnp.int32).at[0, :n].set(tokens[0, start : start + n])
    one, one_entropy = logprobs(graphdef, params, alone, *_row(n))
    np.testing.assert_allclose(packed[0, start : start + n], one[0, :n], atol=1e-5)
    np.testing.assert_allclose(entropy[0, start : start + n], one_entropy[0, :n], atol=1e-5)
  assert float(packed[0, 0]) == float(packed[0, 5]) == 0.0  # a first token is never scored


def test_logprobs_at_the_token_s_temperature(policy):
  graphdef, params = policy
  tokens = jax.random.randint(jax.random.key(2), (1, T), 0, 32)
  positions, segments = _row(T)
  model = nnx.merge(graphdef, params)
  hidden, _ = transformer.hidden_states(model, tokens, positions, segments)
  for temperature in (0.5, 1.0, 1.5):
    got, entropy = logprobs(graphdef, params, tokens, positions, segments, temperature)
    p = jax.nn.log_softmax(hidden @ model.head[...][None] / temperature)[0]
    np.testing.assert_allclose(got[0, 1:], p[np.arange(T - 1), tokens[0, 1:]], atol=1e-5)
    np.testing.assert_allclose(entropy[0, 1:], -(jnp.exp(p) * p).sum(-1)[:-1], atol=1e-5)


def _successor_model():
  """Hidden states of a dense model without layers' effect: next token = this token + 1, for sure."""
  config = ModelConfig(vocab_size=16, d_model=16, num_experts=0, head_dim=8, d_ff=16)
  graphdef, params = transformer.init_params(config, 0)
  params = jax.tree.map(jnp.zeros_like, params)
  params["embed"][...] = jnp.eye(16)
  params["final_norm"][...] = jnp.ones(16)
  params["head"][...] = 100.0 * jnp.roll(jnp.eye(16), 1, axis=1)
  return config, graphdef, params


def test_token_t_is_scored_by_the_tokens_before_it():
  _, graphdef, params = _successor_model()
  positions, segments = _row(6, 6)
  tokens = jnp.array([[3, 4, 5, 6, 7, 8, 0, 1, 2, 9, 10, 11]])
  got, entropy = logprobs(graphdef, params, tokens, positions, segments)
  want = np.zeros(T)
  want[9] = -400.0  # 9 does not follow 2; a unit vector of 16 has norm 4 after the norm
  np.testing.assert_allclose(got[0], want, atol=1e-2)
  assert float(jnp.abs(entropy).max()) < 1e-5


def test_values_belong_to_the_tokens_before_and_next_values_include_the_token():
  config, _, policy = _successor_model()
  graphdef, _ = transformer.init_params(config, 0, "critic")
  params = transformer.value_model_from_policy(config, policy)
  params["value_head"]["kernel"][...] = jnp.arange(16) / 4.0  # the critic returns the last token
  positions, segments = _row(5, 7)
  tokens = positions + 1  # so the value is the number of tokens seen
  values, following = jax.jit(
    lambda p: transformer.token_values(nnx.merge(graphdef, p), tokens, positions, segments)
  )(params)
  np.testing.assert_allclose(values, positions, atol=1e-4)
  np.testing.assert_allclose(following, positions + 1, atol=1e-4)


def test_value_model_copies_share_no_buffer_and_start_at_zero(policy):
  _, params = policy
  _, fresh = transformer.init_params(CONFIG, 0, "critic")
  critic = transformer.value_model_from_policy(CONFIG, params)
  assert jax.tree.structure(critic) == jax.tree.structure(fresh)
  pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}
  assert pointers.isdisjoint(x.unsafe_buffer_pointer() for x in jax.tree.leaves(critic))
  np.testing.assert_array_equal(critic["embed"][...], params["embed"][...])
  assert not np.asarray(critic["value_head"]["kernel"][...]).any()
  assert "head" not in critic


def test_policy_token_loss_equals_autodiff_through_token_logprobs(policy):
  graphdef, params = policy
  tokens = jax.random.randint(jax.random.key(3), (1, T), 0, 32)
  positions, segments = _row(5, 7)
  mask = (segments > 0) & (positions > 1)
  advantage = jax.random.normal(jax.random.key(4), (1, T))
  temperature = jnp.ones((1, T))
  one = jnp.ones(())

  def loss_fn(logprobs, extras):
    return -jnp.exp(logprobs - jax.lax.stop_gradient(logprobs)) * extras, {"seen": one + 0 * extras}

  def fused(params):
    model = nnx.merge(graphdef, params)
    args = (model, tokens, positions, segments, temperature, mask, advantage, loss_fn)
    (total, outputs), stats = transformer.policy_token_loss(*args)
    return total, (outputs, stats)

  def plain(params):
    got, _ = _logprobs(graphdef, params, tokens, positions, segments, mask=mask)
    return jnp.where(mask, loss_fn(got, advantage)[0], 0).sum(), got

  (a, (outputs, stats)), ga = jax.jit(jax.value_and_grad(fused, has_aux=True))(params)
  (b, got), gb = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
  np.testing.assert_allclose(a, b, rtol=1e-5)
  np.testing.assert_allclose(outputs["logprobs"], got, atol=1e-6)
  np.testing.assert_array_equal(outputs["seen"], mask)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ga, gb)
  choices = CONFIG.experts_per_token / CONFIG.num_experts
  assert float(stats["largest_expert_share"]) >= choices / CONFIG.experts_per_token


def test_remat_changes_nothing(policy):
  _, params = policy
  tokens = jax.random.randint(jax.random.key(5), (1, T), 0, 32)
  positions, segments = _row(T)
  results = []
  for remat in ("none", "full"):
    graphdef, _ = transformer.init_params(ModelConfig(**{**vars(CONFIG), "remat": remat}), 0)
    f = lambda p, g=graphdef: _logprobs(g, p, tokens, positions, segments)[0].sum()  # noqa: E731
    results.append(jax.jit(jax.grad(f))(params))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), *results)


def test_router_statistics_count_live_tokens_only():
  counts = {"choices": jnp.array([[6.0, 2, 0, 0]]), "probs": jnp.array([[2.0, 1, 0.5, 0.5]])}
  stats = transformer._router_stats(counts)
  assert float(stats["largest_expert_share"]) == 0.75
  assert float(stats["dead_experts"]) == 2
  np.testing.assert_allclose(stats["aux_loss"], 4 * (0.75 * 0.5 + 0.25 * 0.25))


def test_bfloat16_compute_with_float32_params_is_close(policy):
  _, params = policy
  half = ModelConfig(**{**vars(CONFIG), "compute_dtype": "bfloat16"})
  graphdef, _ = transformer.init_params(half, 0)
  tokens = jax.random.randint(jax.random.key(6), (1, T), 0, 32)
  got, entropy = logprobs(graphdef, params, tokens, *_row(T))
  want, _ = logprobs(transformer.init_params(CONFIG, 0)[0], params, tokens, *_row(T))
  assert got.dtype == entropy.dtype == jnp.float32
  np.testing.assert_allclose(got, want, atol=0.1)
  grads = jax.grad(lambda p: _logprobs(graphdef, p, tokens, *_row(T))[0].sum())(params)
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="kind = 'reward'"):
    transformer.init_params(CONFIG, 0, "reward")
