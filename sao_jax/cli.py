"""``sao-jax <command> --config=configs/x.py --config.part.leaf=value``.

Nothing heavy is imported before a command is known to run: ``--help``, ``--version`` and errors in
a config answer at once.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sao_jax


class Command(NamedTuple):
  """One command: what it calls, and its line in the help."""

  target: str  # "module:function"; called with the Config and the command's own options
  help: str
  options: tuple[str, ...] = ()
  sandbox: bool = True  # whether it runs episodes or leads to a stage that does


COMMANDS = {
  "train": Command(
    "sao_jax.train.run:train",
    "every stage of a run: SFT, value pretraining, RL, evaluation; goes on where it was stopped",
    ("fresh",),
  ),
  "sft": Command("sao_jax.train.run:sft", "the supervised start alone", ("fresh",)),
  "pretrain-value": Command(
    "sao_jax.train.run:pretrain_critic", "the value model, before RL", ("fresh",)
  ),
  "evaluate": Command(
    "sao_jax.train.run:evaluate", "held-out reward of a checkpoint: avg@k and pass@k, per task"
  ),
  "export": Command(
    "sao_jax.train.run:export",
    "the policy as a folder that other libraries load",
    ("out",),
    sandbox=False,
  ),
}
REPORT = "one HTML page that explains a run, or lays several over each other"
EXPERIMENT = (
  "arms × seeds of runs, then a table with intervals and a figure; goes on where it was stopped"
)

EXAMPLE = """\
example:
  sao-jax train --config=configs/quickstart.py --config.seed=1 --config.critic.lr=1e-4

--dry-run prints every setting that can be overridden so, and its value, the numbers of parameters,
the first learning rates and an estimate of the memory.
"""
STATUSES = """
exit status:
  0 done, 1 failed, 2 refused (the configuration), 75 stopped by SIGTERM with every step saved: run the
  same command again (without --fresh), 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit status (see ``outcome``)."""
  arguments, rest = _parser().parse_known_args(argv)
  from sao_jax import outcome
  from sao_jax.config import ConfigError

  def say(text: object) -> None:
    print(f"sao-jax: {text}", file=sys.stderr)

  try:
    if arguments.command == "report":
      return _report(arguments, rest)
    with _sigterm_asks_for_another_start():
      if arguments.command == "experiment":
        return _experiment(arguments, rest)
      return _run(arguments, rest)
  except ConfigError as error:
    say(error)
    return outcome.EXIT_REFUSED
  except outcome.RunFailed as error:
    say(error)
    return outcome.EXIT_FAILED
  except outcome.Preempted as where:
    how = "without --fresh " if getattr(arguments, "fresh", False) else ""
    say(f"stopped ({where}); run the same command {how}to go on from what is saved")
    return outcome.EXIT_AGAIN
  except KeyboardInterrupt:
    say("interrupted; run the same command to go on from the last checkpoint")
    return outcome.EXIT_INTERRUPTED


@contextlib.contextmanager
def _sigterm_asks_for_another_start() -> Iterator[None]:
  """Until a run listens itself: while JAX is imported there is nothing to save."""
  from sao_jax.outcome import EXIT_AGAIN

  if threading.current_thread() is not threading.main_thread():
    yield
    return
  old = signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_AGAIN))
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, old)


def _parser() -> argparse.ArgumentParser:
  def formatted(**kwargs: Any) -> dict[str, Any]:
    kind = argparse.RawDescriptionHelpFormatter
    return {"formatter_class": kind, "allow_abbrev": False, **kwargs}

  parser = argparse.ArgumentParser(
    prog="sao-jax", **formatted(description=sao_jax.__doc__, epilog=EXAMPLE + STATUSES)
  )
  parser.add_argument("--version", action="version", version=f"sao-jax {sao_jax.__version__}")
  commands = parser.add_subparsers(dest="command", metavar="command", required=True)
  for name, command in COMMANDS.items():
    sub = commands.add_parser(
      name, **formatted(help=command.help, description=command.help, epilog=EXAMPLE + STATUSES)
    )
    sub.add_argument("--config", required=True, metavar="FILE", help="file with get_config()")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved run and stop")
    if "fresh" in command.options:
      sub.add_argument(
        "--fresh", action="store_true", help="start over; an old run folder is kept as <folder>.1"
      )
    if "out" in command.options:
      sub.add_argument("--out", default="", metavar="FOLDER", help="default: in the run's folder")
  report = commands.add_parser("report", **formatted(help=REPORT, description=REPORT))
  report.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/quickstart")
  report.add_argument("--out", metavar="FILE", help="default: report.html in the first run")
  experiment = commands.add_parser(
    "experiment", **formatted(help=EXPERIMENT, description=EXPERIMENT, epilog=STATUSES)
  )
  experiment.add_argument("path", metavar="FILE", help="such as configs/experiments/lag.py")
  experiment.add_argument("--small", action="store_true", help="minutes: does every arm run")
  experiment.add_argument("--seeds", metavar="0,1,…", help="instead of the experiment's")
  experiment.add_argument(
    "--jobs", type=int, default=1, help="runs at once; times then are of a shared machine"
  )
  experiment.add_argument(
    "--out", default="", metavar="FOLDER", help="of table and figure; default: beside the runs"
  )
  return parser


def _run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
  from sao_jax import loader
  from sao_jax.config import ConfigError

  command = COMMANDS[arguments.command]
  overrides = _overrides(rest)
  _refuse_bare(arguments.config, overrides)
  config = loader.load(arguments.config, overrides)
  if arguments.dry_run:
    for path, value in loader.leaves(config):
      print(f"{path} = {value!r}" + ("  # overridden" if path in overrides else ""))
    print(*_resolve("sao_jax.train.preview:preview")(config), sep="\n")
    if problem := _refusal(config, command):
      print(f"this run would be refused: {problem}")
    return 0
  if problem := _refusal(config, command):
    raise ConfigError(problem)
  _keep_compiled_programs()
  _resolve("sao_jax.memory:keep_freed")()
  options = {name: getattr(arguments, name) for name in command.options}
  result = _resolve(command.target)(config, **options)
  return result if isinstance(result, int) else 0


def _refusal(config: Any, command: Command) -> str:
  """Why the run could not use its tool or environment here; found before hours of other stages."""
  if not command.sandbox:
    return ""
  if config.env.name == "coding":
    return "env.name = 'coding' is not written yet: this config resolves and does not run"
  if config.sandbox.backend != "bwrap":
    return ""
  return _resolve("sao_jax.envs.sandbox:unavailable")(config.sandbox)


def _refuse_bare(path: str, overrides: Mapping[str, str | bool]) -> None:
  """Only what is true or false may go without a value; anything else would be called 'true'."""
  from sao_jax import loader
  from sao_jax.config import ConfigError

  if True not in overrides.values():
    return
  known = dict(loader.leaves(loader.read(path)))
  for name, value in overrides.items():
    if value is True and not isinstance(known.get(name, True), bool):
      raise ConfigError(
        f"--config.{name} has no value: write --config.{name}=…; only settings that are true or false "
        "may go without"
      )


def _keep_compiled_programs() -> None:
  """In the user's cache, so that a run that goes on, and the next stage, need not compile again."""
  cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(cache, "sao_jax", "jax"))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


def _report(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
  from sao_jax.config import ConfigError

  if rest:
    raise ConfigError(f"unknown argument {rest[0]}: see sao-jax report --help")
  print(_resolve("sao_jax.train.report:write_report")(arguments.runs, arguments.out))
  return 0


def _experiment(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
  from sao_jax.config import ConfigError

  if rest:
    raise ConfigError(f"unknown argument {rest[0]}: see sao-jax experiment --help")
  try:
    seeds = [int(x) for x in arguments.seeds.split(",")] if arguments.seeds else None
  except ValueError as error:
    raise ConfigError(f"--seeds={arguments.seeds}: numbers with commas between them") from error
  _keep_compiled_programs()
  options = {"small": arguments.small, "seeds": seeds, "jobs": arguments.jobs, "out": arguments.out}
  _resolve("sao_jax.train.experiment:run_experiment")(arguments.path, **options)
  return 0


def _resolve(target: str) -> Callable[..., Any]:
  module, function = target.split(":")
  return getattr(importlib.import_module(module), function)


def _overrides(rest: Sequence[str]) -> dict[str, str | bool]:
  """``--config.a.b=1``, ``--config.a.b 1`` and a bare ``--config.a.b`` (true), by dotted path."""
  from sao_jax.config import ConfigError

  overrides: dict[str, str | bool] = {}
  words = list(rest)
  while words:
    name, equals, value = words.pop(0).partition("=")
    if not name.startswith("--config."):
      raise ConfigError(
        f"unknown argument {name}: settings are given as --config.part.name=value; see --help"
      )
    bare = not equals and (not words or words[0].startswith("--"))
    if not (equals or bare):
      value = words.pop(0)
    overrides[name.removeprefix("--config.")] = bare or value
  return overrides


if __name__ == "__main__":
  sys.exit(main())
