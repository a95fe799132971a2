"""A process per call, with limits that hold against what the process wants."""

import asyncio
import dataclasses
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Literal, Self

from sao_jax.config import SandboxConfig
from sao_jax.envs.base import EnvFailure
from sao_jax.envs.pool import WorkerPool

Status = Literal["ok", "error", "timeout", "memory", "output_limit"]

MAX_CODE_BYTES = 256 * 1024
FILE_BYTES = 16 * 2**20  # largest file the code may write
_OUT_OF_MEMORY, _OUT_OF_TIME = 97, 98  # exit statuses of the runner below, never of the code
_REAP_SECONDS = 5.0  # for the kernel to reap what was killed

_START_SECONDS = 30.0  # for the interpreter to start; beyond that the machine is to blame
STARTED = b"\x06"  # the runner's first byte: whatever fails before it is not the code's fault

# Runs the code on stdin and, like the interactive interpreter, shows the value of the last
# expression.  Limits are set again from within, because the count of processes is per namespace.
# The code has a process of its own, so that the runner sees what ended it: a status that the code
# chose is an error, whatever its number, and a signal is a limit's only where the limit was reached.
_RUNNER = """
import ast, os, resource, sys
limits = dict(zip(("NPROC", "AS", "CPU", "FSIZE"), map(int, sys.argv[1:])))
ended, end = os.pipe()
def watch(child):
  import signal
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  os.close(end)
  _, status, usage = os.wait4(child, 0)
  code = os.waitstatus_to_exitcode(status)
  os.set_blocking(ended, False)  # a daemon of the code may hold the other end
  try: told = os.read(ended, 1)
  except BlockingIOError: told = b""
  if code == 0: return 0
  if (code, told) == (97, b"m"): return 97
  if (code, told) == (1, b"e"): return 1
  if code in (-signal.SIGXCPU, -signal.SIGKILL):
    if limits["CPU"] and usage.ru_utime + usage.ru_stime > 0.9 * limits["CPU"]: return 98
  # The system ran out of memory before the limit: it kills what holds much of it.
  if code == -signal.SIGKILL and 0 < limits["AS"] < 2 * 1024 * usage.ru_maxrss: return 97
  try: text = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
  except ValueError: text = f"killed by signal {-code}"
  os.write(1, text.encode() + b"\\n")
  return 1
child = os.fork()
if child: os._exit(watch(child))
os.close(ended)
if limits["NPROC"]: limits["NPROC"] += 1  # the runner's own
for name, value in limits.items():
  kind = getattr(resource, "RLIMIT_" + name)
  most = resource.getrlimit(kind)[1]
  # One second between soft and hard tells a spent CPU limit (SIGXCPU) from a kill.
  hard = value + (name == "CPU")
  hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
  if value and not (name == "AS" and sys.platform == "darwin"):  # not supported there
    resource.setrlimit(kind, (min(value, hard), hard))
del name, value, kind, most, hard, limits, child
os.write(1, b"\x06")
source = sys.stdin.buffer.read()
def main():
  tree = ast.parse(source, "<code>")
  last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
  names = {"__name__": "__main__", "__builtins__": __builtins__}
  exec(compile(tree, "<code>", "exec"), names)
  if last is not None:
    value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
    if value is not None: print(repr(value))
  sys.stdout.flush()
try:
  main()
except MemoryError:
  names = None
  os.write(1, b"MemoryError\\n")
  os.write(end, b"m")
  os._exit(97)
except SystemExit:
  raise
except BaseException as error:
  import traceback
  sys.stdout.flush()
  lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<code>"]
  where = f" (line {lines[-1]})" if lines and b"\\n" in source.strip() else ""
  text = traceback.format_exception_only(type(error), error)[-1].strip()
  os.write(1, (text[:2000] + where + "\\n").encode("utf-8", "replace"))
  os.write(end, b"e")
  os._exit(1)
"""


@dataclasses.dataclass(frozen=True)
class SandboxResult:
  """What the code printed (stdout and stderr as they came) and how it ended."""

  output: str
  status: Status
  seconds: float


class SandboxFailure(EnvFailure):
  """The sandbox itself is broken; the code is not to blame."""


class _Call:
  """One running process, which another thread may end.

  A cancelled process is killed once its runner has started.  Earlier bubblewrap's first process may
  not be bound to the life of the one that is killed: it would go on without any clock.
  """

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._process: subprocess.Popen | None = None
    self._started = False
    self.cancelled = False

  def hold(self, process: subprocess.Popen) -> None:
    with self._lock:
      self._process = process

  def started(self) -> None:
    with self._lock:
      self._started = True
      if self.cancelled and self._process is not None:
        _kill(self._process)

  def cancel(self) -> None:
    with self._lock:
      self.cancelled = True
      if self._started and self._process is not None:
        _kill(self._process)

  def end(self) -> None:
    """Kills what is left and reaps it; the process id may be reused only after this."""
    with self._lock:
      process, self._process = self._process, None
      if process is None:
        return
      _kill(process)
      try:
        process.wait(_REAP_SECONDS)
      except subprocess.TimeoutExpired:
        raise SandboxFailure(f"process {process.pid} survived SIGKILL") from None


def _kill(process: subprocess.Popen) -> None:
  # Not reaped yet, so the group still is this process's; bwrap's death ends its whole namespace.
  if process.returncode is None:
    try:
      os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
      process.kill()


class ProcessSandbox:
  """A process per call, with the limits of ``SandboxConfig`` enforced by the reader of its output.

  ``SandboxConfig.concurrency`` calls run at once and the others wait in line, which counts against
  nobody's deadline (see ``envs.pool``).

  Args:
    name: for messages.
    config: limits.
    command: what to put before the interpreter's own arguments.
    isolated: the command gives the code namespaces, a user and an environment of its own.
  """

  interpreter = True

  def __init__(
    self, name: str, config: SandboxConfig, command: Sequence[str], *, isolated: bool
  ) -> None:
    self.name = name
    self._config = config
    self._command = list(command)
    self._isolated = isolated
    self._calls: set[_Call] = set()
    self._lock = threading.Lock()
    self._closed = False
    self._pool = WorkerPool(config.concurrency, f"sandbox-{name}")

  async def run(self, code: str) -> SandboxResult:
    data = code.encode("utf-8", "replace")
    if len(data) > MAX_CODE_BYTES:
      text = f"SyntaxError: {len(data)} bytes of code, at most {MAX_CODE_BYTES}\n"
      return SandboxResult(text, "error", 0.0)
    call = _Call()
    with self._lock:
      if self._closed:
        raise SandboxFailure(f"sandbox {self.name!r} is closed")
      self._calls.add(call)
      job = self._pool.submit(functools.partial(self._run, data, call))
    try:
      return await job.result()
    except asyncio.CancelledError:
      call.cancel()
      raise
    finally:
      with self._lock:
        self._calls.discard(call)

  def close(self) -> None:
    with self._lock:
      self._closed = True
      calls = list(self._calls)
    for call in calls:
      call.cancel()
    self._pool.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _run(self, data: bytes, call: _Call, beat: Callable[[], None]) -> SandboxResult:
    if call.cancelled:
      raise SandboxFailure("cancelled before it started")
    with tempfile.TemporaryFile() as source:
      source.write(data)
      source.seek(0)
      output, status, code, seconds = self._watch(source, call, beat)
    if call.cancelled:
      raise SandboxFailure("cancelled while it ran")
    return SandboxResult(output.decode("utf-8", "replace"), status or _status(code), seconds)

  def _watch(
    self, source: IO[bytes], call: _Call, beat: Callable[[], None]
  ) -> tuple[bytes, Status | None, int, float]:
    """Runs one process: (output, status if it was cut short, exit status, seconds)."""
    try:
      process = subprocess.Popen(
        [*self._command, *runner_arguments(self._config, isolated=self._isolated)],
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=None if self._isolated else {"PATH": os.defpath, "LANG": "C.UTF-8"},
        cwd="/" if self._isolated else tempfile.gettempdir(),
        bufsize=0,
      )
    except OSError as error:
      raise SandboxFailure(f"cannot start {self._command[0]}: {error}") from error
    call.hold(process)
    assert process.stdout is not None
    with process.stdout:
      try:
        self._await_start(process.stdout.fileno(), call)
        call.started()
        start = time.perf_counter()
        output, status = self._read(process, process.stdout.fileno(), start, beat)
        seconds = time.perf_counter() - start
      finally:
        call.end()
    return output, status, process.returncode, seconds

  def _await_start(self, descriptor: int, call: _Call) -> None:
    """Returns when the runner is about to run the code: the clock of the code starts here.

    A runner that starts later than this waits finds its output closed and ends by itself.
    """
    if not _readable(descriptor, _START_SECONDS):
      raise SandboxFailure(f"{self.name} did not start within {_START_SECONDS:.0f} s")
    first = os.read(descriptor, 1)
    if first != STARTED and not call.cancelled:
      rest = os.read(descriptor, 4096) if first else b""
      text = (first + rest).decode("utf-8", "replace").strip()
      raise SandboxFailure(f"{self.name} did not run the code: {text[-300:]!r}")

  def _read(
    self, process: subprocess.Popen, descriptor: int, start: float, beat: Callable[[], None]
  ) -> tuple[bytes, Status | None]:
    limit, size = self._config.output_kb * 1024, 0
    chunks: list[bytes] = []
    exited = False
    while True:
      beat()  # the code may be slow, but the clock that will end it runs
      remaining = start + self._config.wall_seconds - time.perf_counter()
      if remaining <= 0:
        return b"".join(chunks), "timeout"
      # A daemon of the code may hold the pipe open after its parent ended: look for the end too.
      if _readable(descriptor, 0 if exited else min(remaining, 0.1)):
        data = os.read(descriptor, min(65536, limit + 1 - size))
        if not data:
          return b"".join(chunks), None
        chunks.append(data)
        size += len(data)
        if size > limit:
          return b"".join(chunks)[:limit], "output_limit"
      elif exited:
        return b"".join(chunks), None
      else:
        exited = _has_exited(process)


def runner_arguments(config: SandboxConfig, *, isolated: bool) -> list[str]:
  """What follows the interpreter on its command line.

  Without a namespace the count of processes would be the user's own, so it is left alone.
  """
  limits = [config.processes if isolated else 0, config.memory_mb * 2**20]
  limits += [config.cpu_seconds, FILE_BYTES]
  return ["-I", "-c", _RUNNER, *map(str, limits)]


def _readable(descriptor: int, seconds: float) -> bool:
  poller = select.poll()
  poller.register(descriptor, select.POLLIN)
  return bool(poller.poll(seconds * 1e3))


def _has_exited(process: subprocess.Popen) -> bool:
  # Without reaping it, so that its process group cannot become another's before it is killed.
  if sys.platform == "darwin":
    return process.poll() is not None
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, process.pid, flags) is not None


def _status(code: int) -> Status:
  """Of the runner's exit status; the code may have killed it, which is an error like any other."""
  statuses: dict[int, Status] = {0: "ok", _OUT_OF_MEMORY: "memory", _OUT_OF_TIME: "timeout"}
  return statuses.get(code, "error")
