"""Schedules by hand; frozen leaves stay bit-equal, cost nothing and count nowhere."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sao_jax.config import ConfigError, OptimizerConfig
from sao_jax.optim import (
  count_parameters,
  label_tree,
  learning_rate,
  make_optimizer,
  path_name,
  stop_frozen,
  trained_norm,
)

PATTERNS = (r"ffn/(w_gate_up|w_down)", r"value_head")


def tree(fill=1.0):
  return {
    "layers": {
      "attention": {"wq": jnp.full((4, 4), fill)},
      "ffn": {
        "router": jnp.full((4, 2), fill),
        "w_gate_up": jnp.full((2, 4, 6), fill),
        "w_down": jnp.full((2, 3, 4), fill),
      },
    },
    "value_head": {"kernel": jnp.full((4,), fill), "bias": jnp.full((), fill)},
  }


def test_warmup_starts_above_zero_and_constant_holds():
  rate = learning_rate(OptimizerConfig(lr=1.0, warmup_steps=4), total_steps=100)
  np.testing.assert_allclose(
    [rate(i) for i in (0, 1, 3, 4, 99)], [0.2, 0.4, 0.8, 1.0, 1.0], rtol=1e-6
  )


def test_cosine_ends_at_the_last_step():
  config = OptimizerConfig(lr=2.0, warmup_steps=2, schedule="cosine", final_fraction=0.1)
  rate = learning_rate(config, total_steps=12)
  np.testing.assert_allclose(rate(2), 2.0, rtol=1e-6)
  assert float(rate(10)) > 0.2 + 1e-3
  np.testing.assert_allclose(rate(11), 0.2, rtol=1e-6)


@pytest.mark.parametrize("updates_per_step", [1, 2, 5])
def test_schedule_counts_loop_steps_not_updates(updates_per_step):
  config = OptimizerConfig(lr=1.0, warmup_steps=3, schedule="cosine")
  once = learning_rate(config, 20)
  often = learning_rate(config, 20, updates_per_step)
  for step in range(20):
    for k in range(updates_per_step):
      np.testing.assert_allclose(often(step * updates_per_step + k), once(step), rtol=1e-6)


def test_labels_name_paths_and_refuse_what_does_nothing():
  labels = label_tree(tree(), PATTERNS)
  named = {path_name(p): v for p, v in jax.tree_util.tree_flatten_with_path(labels)[0]}
  assert named == {
    "layers/attention/wq": "frozen",
    "layers/ffn/router": "frozen",
    "layers/ffn/w_gate_up": "train",
    "layers/ffn/w_down": "train",
    "value_head/kernel": "train",
    "value_head/bias": "train",
  }
  assert count_parameters(tree(), labels) == (48 + 24 + 5, 16 + 8)
  with pytest.raises(ConfigError, match="matches none of the 6 parameters"):
    label_tree(tree(), ("experts",))
  with pytest.raises(ConfigError, match="nothing is frozen"):
    label_tree(tree(), (".*",))
  assert set(jax.tree.leaves(label_tree(tree(), ()))) == {"train"}


def test_frozen_leaves_are_bit_equal_after_weight_decay_and_have_no_moments():
  params, labels = tree(1.7), label_tree(tree(), PATTERNS)
  tx = make_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.1), labels, 20)
  opt_state = tx.init(params)
  start = params
  update = jax.jit(lambda g, s, p: tx.update(g, s, p))
  for _ in range(20):
    grads = jax.grad(lambda p: sum((x**2).sum() for x in jax.tree.leaves(stop_frozen(p, labels))))(
      params
    )
    updates, opt_state = update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
  for before, after, label in zip(
    jax.tree.leaves(start), jax.tree.leaves(params), jax.tree.leaves(labels), strict=True
  ):
    assert np.array_equal(before, after) == (label == "frozen")
  live, _ = count_parameters(params, labels)
  moments = [x for x in jax.tree.leaves(opt_state) if x.dtype == jnp.float32]
  assert sum(x.nbytes for x in moments) == 2 * 4 * live
  assert sum(x.nbytes for x in jax.tree.leaves(opt_state)) - 2 * 4 * live <= 8  # step counts


def test_a_planted_gradient_on_a_frozen_leaf_changes_neither_update_nor_norm():
  params, labels = tree(), label_tree(tree(), PATTERNS)
  tx = make_optimizer(OptimizerConfig(lr=0.1, clip_norm=1.0), labels, 20)
  grads = tree(0.01)
  planted = jax.tree.map(lambda g, label: g if label == "train" else g + 1e6, grads, labels)
  plain, _ = tx.update(grads, tx.init(params), params)
  spoiled, _ = tx.update(planted, tx.init(params), params)
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(spoiled), strict=True):
    np.testing.assert_array_equal(a, b)
  assert trained_norm(grads, labels) == trained_norm(planted, labels)
  np.testing.assert_allclose(trained_norm(grads, labels), 0.01 * np.sqrt(77), rtol=1e-6)
