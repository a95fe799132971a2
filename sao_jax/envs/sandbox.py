"""Where model-written code runs.  It is hostile: every limit is enforced from outside.

``bwrap``   setpriv (own unprivileged user) → prlimit → bubblewrap with every namespace of its own.
``expr``    in-process evaluation of arithmetic only: safe everywhere, no interpreter.
``unsafe``  a child process with resource limits: no protection of files, environment or network.
``auto``    bwrap where ``true`` runs inside it, else expr.

What the code does wrong (crash, time, memory, output) is a status of the result, an observation for
the model.  SandboxFailure is the infrastructure's and never becomes a reward.
"""

import logging
import sys
import time
from typing import Protocol, Self

from sao_jax.config import SandboxConfig
from sao_jax.envs.bwrap import bwrap_sandbox
from sao_jax.envs.expression import ExpressionError, evaluate
from sao_jax.envs.process import ProcessSandbox, SandboxFailure, SandboxResult, Status

log = logging.getLogger(__name__)

__all__ = [
  "ExprSandbox",
  "ProcessSandbox",
  "Sandbox",
  "SandboxFailure",
  "SandboxResult",
  "make_sandbox",
  "require_interpreter",
  "unavailable",
]


class Sandbox(Protocol):
  """Runs code; state never crosses calls.  A remote service can stand in.

  ``interpreter`` is False where only arithmetic can be run.
  """

  name: str
  interpreter: bool

  async def run(self, code: str) -> SandboxResult:
    """Raises SandboxFailure for infrastructure only."""

  def close(self) -> None:
    """Ends what still runs; may be called more than once."""

  def __enter__(self) -> Self: ...

  def __exit__(self, *exc: object) -> None: ...


def make_sandbox(config: SandboxConfig) -> Sandbox:
  """The sandbox of a config, checked by running something in it.

  Raises:
    SandboxFailure: ``bwrap`` was asked for and does not work here; the message has the reason.
    ValueError: unknown backend.
  """
  match config.backend:
    case "expr":
      return ExprSandbox()
    case "unsafe":
      log.warning(
        "sandbox.backend = 'unsafe': model-written code runs with YOUR user's rights. It can read "
        "and write your files, see your environment variables, use the network, signal your "
        "processes and leave processes behind. Only time, memory and output are limited. Use "
        "'bwrap' for code you would not run yourself."
      )
      return ProcessSandbox("unsafe", config, [sys.executable], isolated=False)
    case "bwrap":
      return bwrap_sandbox(config)
    case "auto":
      try:
        return bwrap_sandbox(config)
      except SandboxFailure as reason:
        log.warning("sandbox: bwrap does not work here (%s); arithmetic only (expr)", reason)
        return ExprSandbox()
  raise ValueError(f"sandbox.backend = {config.backend!r}: choose one of auto, bwrap, expr, unsafe")


def unavailable(config: SandboxConfig) -> str:
  """Why the sandbox of a config does not work here, and the way out; empty where it does."""
  if config.backend != "bwrap":  # the others work everywhere
    return ""
  try:
    bwrap_sandbox(config).close()
  except SandboxFailure as reason:
    return (
      f"sandbox.backend = 'bwrap' does not work here ({reason}): install bubblewrap (apt install "
      "bubblewrap), or set sandbox.backend = 'expr' (arithmetic only) or 'auto' (expr where bwrap does "
      "not work)"
    )
  return ""


def require_interpreter(sandbox: Sandbox, what: str) -> None:
  """Refuses a sandbox that evaluates arithmetic only, for ``what`` needs a whole interpreter."""
  if not sandbox.interpreter:
    raise ValueError(
      f"{what} runs whole programs, and sandbox {sandbox.name!r} evaluates arithmetic only: "
      "install bubblewrap (apt install bubblewrap) and set sandbox.backend = 'bwrap'"
    )


class ExprSandbox:
  """Arithmetic in this process; see ``envs.expression``."""

  name = "expr"
  interpreter = False

  async def run(self, code: str) -> SandboxResult:
    start = time.perf_counter()
    status: Status = "ok"
    try:
      output = f"{evaluate(code)}\n"
    except ExpressionError as error:
      output, status = f"{error}\n", "error"
    return SandboxResult(output, status, time.perf_counter() - start)

  def close(self) -> None:
    return None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()
