"""WeightStore: copies, order, waiting."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.rollout.weights import WeightStore
from sao_jax.types import Version


def test_publish_copies_before_the_trainer_donates():
  step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1.0, p), donate_argnums=0)
  params = {"a": jnp.zeros(1000), "b": {"c": jnp.ones((3, 4))}}
  store = WeightStore(params, Version(0, 0))
  for i in range(1, 5):
    params = step(params)
    store.publish(params, Version(0, i))
  step(params)
  version, view = store.current()
  assert version == Version(0, 4)
  np.testing.assert_array_equal(view["a"], np.full(1000, 4.0, np.float32))


def test_the_store_shares_no_buffer_even_where_the_transform_does_nothing():
  params = {"a": jnp.arange(8.0), "b": jnp.ones(3)}
  store = WeightStore(params, Version(0, 0), transform=lambda p: {"a": p["a"], "b": p["b"] * 2})
  view = store.current()[1]
  assert view["a"].unsafe_buffer_pointer() != params["a"].unsafe_buffer_pointer()
  np.testing.assert_array_equal(view["b"], 2 * np.ones(3, np.float32))


@pytest.mark.parametrize("version", [(1, 5), (1, 4), (0, 9)])
def test_versions_never_go_back(version):
  store = WeightStore(jnp.zeros(1), Version(1, 5))
  with pytest.raises(ValueError, match=r"cannot publish version .* already holds \(1, 5\)"):
    store.publish(jnp.ones(1), Version(*version))
  assert store.version == Version(1, 5)
  store.publish(jnp.ones(1), Version(2, 0))  # a restarted trainer
  assert store.version == Version(2, 0)


def test_wait_for():
  store = WeightStore(jnp.zeros(1), Version(0, 0))
  with pytest.raises(TimeoutError, match=r"version \(0, 1\) was not published within 0.01 s"):
    store.wait_for(Version(0, 1), timeout=0.01)
  seen = []
  waiting = threading.Thread(target=lambda: seen.append(store.wait_for(Version(0, 2), timeout=30)))
  waiting.start()
  store.publish(jnp.zeros(1), Version(0, 1))
  store.publish(jnp.zeros(1), Version(0, 3))
  waiting.join(30)
  assert seen == [Version(0, 3)]


def test_an_engine_gives_a_bare_store_its_transform_once():
  store = WeightStore(jnp.ones(2), Version(0, 7))
  store.use(lambda p: p * 3)
  version, view = store.current()
  assert version == Version(0, 7)
  np.testing.assert_array_equal(view, [3.0, 3.0])
  store.publish(jnp.ones(2) * 2, Version(0, 8))
  np.testing.assert_array_equal(store.current()[1], [6.0, 6.0])
  with pytest.raises(ValueError, match="already has a transform"):
    store.use(lambda p: p)


def test_version_and_weights_are_read_together():
  store = WeightStore(jnp.zeros(()), Version(0, 0))
  wrong, stop = [], threading.Event()

  def read():
    while not stop.is_set():
      version, view = store.current()
      if int(view) != version.step:
        wrong.append((version, int(view)))

  readers = [threading.Thread(target=read) for _ in range(2)]
  for thread in readers:
    thread.start()
  for i in range(1, 200):
    store.publish(jnp.asarray(float(i)), Version(0, i))
  stop.set()
  for thread in readers:
    thread.join()
  assert not wrong
