"""Where arrays live: one mesh, and one table from the names of parameters to its axes.

Rows of a batch are split over ``data``, ``fsdp`` and ``expert`` together; parameters and what the
optimizer keeps for them over ``fsdp`` (their d_model axis) and ``expert`` (their expert axis).  The
compiler inserts the collectives.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sao_jax.config import ConfigError, MeshConfig

# The first pattern that ends a parameter's path gives the axes of its last dimensions; leading ones
# (stacked layers) are not split.  What no pattern fits is on every device.
AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
  (r"embed", (None, "fsdp")),
  (r"(^|/)head", ("fsdp", None)),
  (r"attention/w[qkv]", ("fsdp", None)),
  (r"attention/wo", (None, "fsdp")),
  (r"ffn/w_gate_up", ("expert", "fsdp", None)),
  (r"ffn/w_down", ("expert", None, "fsdp")),
)
ROWS = ("data", "fsdp", "expert")


def make_mesh(config: MeshConfig) -> Mesh | None:
  """The mesh of a run, or None for one device.

  Raises ConfigError if there are too few devices, or several processes: of those, each would sample and
  save a run of its own.
  """
  if (processes := jax.process_count()) > 1:
    raise ConfigError(
      f"{processes} processes joined by jax.distributed: a run is one process yet, whatever its devices; "
      "start one, and spread it over its devices with mesh.*. Checkpoints do not depend on either."
    )
  sizes = dataclasses.asdict(config)
  needed, devices = math.prod(sizes.values()), jax.devices()
  if needed == 1:
    return None
  if needed > len(devices):
    shape = " × ".join(f"{name} {size}" for name, size in sizes.items())
    raise ConfigError(
      f"mesh {shape} needs {needed} devices, but there are {len(devices)}; lower mesh.*, or on a CPU "
      f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    )
  return Mesh(
    np.array(devices[:needed]).reshape(tuple(sizes.values())),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def param_shardings(mesh: Mesh | None, tree: Any) -> Any:
  """A sharding per leaf of a tree that has parameters' paths in it (an optimizer state too).

  An axis that does not divide its dimension is left out.  None without a mesh.
  """
  if mesh is None:
    return None

  def of(path: Any, leaf: Any) -> NamedSharding:
    name = "/".join(str(key.key) for key in path if hasattr(key, "key"))
    axes = next((axes for pattern, axes in AXES if re.search(pattern + "$", name)), ())
    axes = axes[-leaf.ndim :] if leaf.ndim else ()
    padded = (None,) * (leaf.ndim - len(axes)) + tuple(axes)
    spec = [
      axis if axis is not None and size % mesh.shape[axis] == 0 else None
      for axis, size in zip(padded, leaf.shape, strict=True)
    ]
    return NamedSharding(mesh, P(*spec))

  return jax.tree_util.tree_map_with_path(of, tree)


def place_batch(mesh: Mesh | None, batch: Any) -> Any:
  """The batch on its devices: "B T" arrays split by rows, "N" arrays everywhere."""
  if mesh is None:
    return jax.device_put(batch)

  def of(x: Any) -> NamedSharding:
    return NamedSharding(mesh, P(ROWS, None) if x.ndim == 2 else P())

  return jax.device_put(batch, jax.tree.map(of, batch))


def settle(mesh: Mesh | None, tree: Any) -> Any:
  """Waits for ``tree`` where several CPU devices would else run collectives of two steps at once,
  which deadlocks; elsewhere returns at once."""
  if mesh is not None and jax.default_backend() == "cpu":
    jax.block_until_ready(tree)
  return tree
