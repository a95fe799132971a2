"""What every test runs under: CPU, compilation cache, strict JAX, checked shapes, no warnings."""

import os
import pathlib
import tempfile


def _cache_dir() -> str:
  """A folder for compiled programs that outlives the run: user cache, else the temporary folder."""
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  folder = pathlib.Path(base) / "sao_jax" / "jax"
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    folder = pathlib.Path(tempfile.gettempdir()) / "sao_jax_jax_cache"
    folder.mkdir(exist_ok=True)
  return str(folder)


# In the environment, not in jax.config, so that the subprocesses of tests share them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_dir())
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("MPLBACKEND", "agg")

from jaxtyping import install_import_hook  # noqa: E402

# Shapes and dtypes of these packages are checked at every call.  The hook rewrites modules as they
# are imported, so it has to come before the first import of sao_jax.
CHECKED = (
  "sao_jax.kernels",
  "sao_jax.models",
  "sao_jax.rollout.sampling",
  "sao_jax.train",
)
install_import_hook(CHECKED, "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
