"""The weights that the rollout engine uses: one (version, view) pair, swapped atomically."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.types import Version


class WeightStore:
  """Holds the newest policy weights, as the engine wants them.

  ``publish`` copies: when it returns, the store shares no buffer with ``params`` and the copy is
  finished on the device, so the trainer may donate its parameters to the next step at once, and an
  engine that picks the new version up never waits for a training step to end.  ``current`` is one
  atomic read of (version, view): what is sampled with the view belongs to that version.  Every
  engine step that starts after ``publish`` returned uses that version or a later one, so the return
  of ``publish`` is the acknowledgement.

  Args:
    params: pytree of arrays.
    version: (incarnation, step) of ``params``.
    transform: jit-able, parameters → the view that the engine reads.  None: the engine that is
      given this store chooses it (``use``).
    sharding: where the view lives, if not where ``params`` are (a trainer over several devices).
  """

  def __init__(
    self,
    params: Any,
    version: Version,
    transform: Callable[[Any], Any] | None = None,
    sharding: jax.sharding.Sharding | None = None,
  ) -> None:
    self._sharding = sharding
    self._changed = threading.Condition()
    self._publishing = threading.Lock()
    self.transform = transform
    self._copy = _copying(transform)
    self._current = Version(*version), self._copy_now(params)

  def use(self, transform: Callable[[Any], Any]) -> None:
    """Sets the transform of a store that was made without one; keeps the version."""
    with self._publishing:
      if self.transform is not None:
        raise ValueError("this WeightStore already has a transform")
      version, params = self._current
      self.transform = transform
      self._copy = _copying(transform)
      self._current = version, self._copy_now(params)

  def _copy_now(self, params: Any) -> Any:
    view = self._copy(params)
    if self._sharding is not None:
      view = jax.device_put(view, self._sharding)
    return jax.block_until_ready(view)

  def publish(self, params: Any, version: Version) -> None:
    """Makes a copy of ``params`` the current weights.

    Raises:
      ValueError: the version is not greater than the current one (versions never go back).
    """
    version = Version(*version)
    with self._publishing:
      self._refuse_older(version)
      view = self._copy_now(params)
      with self._changed:
        self._current = version, view
        self._changed.notify_all()

  def _refuse_older(self, version: Version) -> None:
    if version <= self.version:
      raise ValueError(
        f"cannot publish version {tuple(version)}: the store already holds {tuple(self.version)}, "
        "and versions only go up (a restarted trainer takes a new incarnation)"
      )

  def current(self) -> tuple[Version, Any]:
    """(version, view), read together."""
    return self._current

  @property
  def version(self) -> Version:
    return self._current[0]

  def wait_for(self, version: Version, timeout: float | None = None) -> Version:
    """Blocks until the store holds ``version`` or a later one; returns the one it holds.

    Raises:
      TimeoutError: after ``timeout`` seconds.
    """
    with self._changed:
      if not self._changed.wait_for(lambda: self.version >= version, timeout):
        raise TimeoutError(
          f"version {tuple(version)} was not published within {timeout} s; the store holds "
          f"{tuple(self.version)}"
        )
      return self.version


@functools.lru_cache(maxsize=16)
def _copying(transform: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
  def copy(params: Any) -> Any:
    view = params if transform is None else transform(params)
    # jit forwards an input that is returned untouched as the same buffer: copy every leaf.
    return jax.tree.map(jnp.copy, view)

  return jax.jit(copy)
