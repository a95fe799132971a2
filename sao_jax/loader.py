"""Config files and overrides: one path for the command line, tests and notebooks.

Every value goes through ml_collections' typed flags, so that a notebook refuses what the command
line refuses::

  config = load("configs/quickstart.py", {"critic.lr": 1e-4, "packing.lengths": (32, 64)})
"""

import dataclasses
import difflib
import pathlib
import runpy
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sao_jax.checks import check
from sao_jax.config import Config, ConfigError


def load(path: str, overrides: Mapping[str, Any] | None = None) -> Config:
  """Runs ``get_config()`` of the file, applies the overrides, checks the whole.

  Args:
    path: a Python file with ``get_config() -> Config``.
    overrides: dotted path to value, as a Python value or as text, e.g. ``{"critic.lr": 1e-4}``.

  Raises:
    ConfigError: no such file, no such setting (with the nearest names), a value of another type, or
      a combination that ``checks.check`` refuses.
  """
  return check(override(read(path), overrides or {}))


def read(path: str) -> Config:
  """The file's configuration, before any override and unchecked."""
  file = pathlib.Path(path)
  if not file.is_file():
    known = sorted(str(p) for p in pathlib.Path("configs").glob("*.py"))
    hint = f" Found here: {', '.join(known)}." if known else ""
    raise ConfigError(f"--config={path}: no such file (from {pathlib.Path.cwd()}).{hint}")
  try:
    get_config = runpy.run_path(str(file), run_name="config").get("get_config")
    config = None if get_config is None else get_config()
  except ConfigError:
    raise
  except Exception as error:
    raise ConfigError(f"--config={path}: {where(error, file)}") from error
  if get_config is None:
    raise ConfigError(f"--config={path}: the file has no get_config()")
  if not isinstance(config, Config):
    raise ConfigError(
      f"--config={path}: get_config() returned a {type(config).__name__}, not a sao_jax Config"
    )
  return config


def where(error: Exception, file: pathlib.Path) -> str:
  """What a config file raised, and at which of its lines."""
  frames = traceback.extract_tb(error.__traceback__)
  line = next((f.lineno for f in reversed(frames) if f.filename == str(file)), None)
  text = str(error)
  if isinstance(error, SyntaxError):
    line, text = error.lineno, error.msg
  return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {text}"


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
  """Every setting as (dotted path, value), in the order of the dataclasses."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      yield from leaves(value, f"{prefix}{field.name}.")
    else:
      yield prefix + field.name, value


def suggest(path: str, paths: Sequence[str]) -> list[str]:
  """The settings that a mistyped path may mean, best first.

  Whole paths are compared, and then last components, so that both ``critc.lr`` and a bare ``lr``
  find ``critic.lr``.
  """

  def similarity(known: str) -> float:
    return difflib.SequenceMatcher(None, path, known).ratio()

  def last(dotted: str) -> str:
    return dotted.rsplit(".", 1)[-1]

  names = difflib.get_close_matches(last(path), {last(p) for p in paths}, n=2, cutoff=0.75)
  near = difflib.get_close_matches(path, paths, n=3, cutoff=0.6)
  near = sorted({*near, *(p for p in paths if last(p) in names)}, key=similarity, reverse=True)
  return [p for p in near[:4] if similarity(p) >= similarity(near[0]) - 0.15]


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
  """A copy of the config with the overrides applied, each typed as its field; see ``load``."""
  known = [path for path, _ in leaves(config)]
  for path, value in overrides.items():
    if path not in known:
      raise ConfigError(_unknown(path, config, known))
    config = _override_one(config, path, value)
  return config


def _override_one(config: Config, path: str, value: Any) -> Config:
  from absl import flags
  from ml_collections import config_flags

  kind = _field_type(path, config)
  problem = ConfigError(f"config.{path} = {value!r}: expected {_describe(kind)}")
  if isinstance(value, bool) and kind is not bool:
    raise problem
  argv = ["sao-jax", f"--config.{path}={value if isinstance(value, str) else repr(value)}"]
  flag_values = flags.FlagValues()
  try:
    holder = config_flags.DEFINE_config_dataclass(
      "config", config, flag_values=flag_values, sys_argv=argv
    )
    flag_values(argv)
  except flags.Error as error:
    raise problem from error
  result = holder.value
  if typing.get_origin(kind) is tuple:  # ml_collections looks no further than "a tuple"
    element = typing.get_args(kind)[0]
    if any(type(item) is not element for item in dict(leaves(result))[path]):
      raise problem
  return result


def _unknown(path: str, config: Config, known: list[str]) -> str:
  inside = [p for p in known if p.startswith(path + ".")]
  if inside:
    return f"config.{path} is a section, not a setting; in it: {', '.join(inside)}"
  if near := suggest(path, known):
    return f"config.{path}: no such setting. Did you mean {' or '.join(near)}?"
  parts = ", ".join(field.name for field in dataclasses.fields(config))
  return f"config.{path}: no such setting. A config has: {parts}"


def _field_type(path: str, config: Any) -> Any:
  *parents, leaf = path.split(".")
  for part in parents:
    config = getattr(config, part)
  return typing.get_type_hints(type(config))[leaf]


def _describe(kind: Any) -> str:
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    example = "('a','b')" if element is str else "(1,2)"
    return f"a tuple of {element.__name__}, such as {example}"
  return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(
    kind, kind.__name__
  )
