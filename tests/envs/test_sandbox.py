"""What model-written code must not be able to do, tried from inside the sandbox."""

import asyncio
import functools
import logging
import os
import pathlib
import socket
import sys
import time

import numpy as np
import pytest

from sao_jax.config import SandboxConfig
from sao_jax.envs.base import EnvFailure
from sao_jax.envs.pool import Patience
from sao_jax.envs.process import ProcessSandbox
from sao_jax.envs.sandbox import SandboxFailure, make_sandbox, require_interpreter

# Stands on the command line of every process of this test run, so that they can be found.
MEMORY_MB = 900 + os.getpid() % 100


@functools.cache
def _bwrap_reason() -> str:
  try:
    make_sandbox(SandboxConfig(backend="bwrap")).close()
  except SandboxFailure as error:
    return str(error)
  return ""


@pytest.fixture
def bwrap():
  if _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  with make_sandbox(_config("bwrap")) as sandbox:
    yield sandbox


def _config(backend, **changes):
  return SandboxConfig(backend=backend, memory_mb=MEMORY_MB, **changes)


def run(sandbox, code):
  return asyncio.run(sandbox.run(code))


def processes() -> list[int]:
  marker = str(MEMORY_MB * 2**20).encode()
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      parts = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile
      continue
    if marker in parts:
      found.append(int(folder.name))
  return found


def descriptors() -> int:
  return len(os.listdir("/proc/self/fd"))


def settled(seconds: float = 5.0) -> list[int]:
  """Processes of ours that are still there after the kernel had time to reap them."""
  end = time.monotonic() + seconds
  while (left := processes()) and time.monotonic() < end:
    time.sleep(0.05)
  return left


@pytest.mark.parametrize("backend", ["bwrap", "unsafe"])
def test_behaves_like_the_interactive_interpreter(backend):
  if backend == "bwrap" and _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  with make_sandbox(_config(backend)) as sandbox:
    assert run(sandbox, "12+3*4").output == "24\n"
    result = run(sandbox, "import math\nx = 3\nprint('hi')\nx * math.factorial(3)")
    assert (result.output, result.status) == ("hi\n18\n", "ok")
    result = run(sandbox, "a = 1\nprint(a)\na / 0")
    assert result.output == "1\nZeroDivisionError: division by zero (line 3)\n"
    assert result.status == "error"
    assert run(sandbox, "print(1").status == "error"
    assert run(sandbox, "x").output == "NameError: name 'x' is not defined\n"
    assert run(sandbox, "import sys\nsys.exit(3)").status == "error"
    assert run(sandbox, "print('\\u00e9')").output == "é\n"


def test_expr_gives_the_same_value():
  with make_sandbox(SandboxConfig(backend="expr")) as sandbox:
    assert run(sandbox, "12+3*4").output == "24\n"
    assert run(sandbox, "1/0").status == "error"
    assert run(sandbox, "1/0").output == "ZeroDivisionError: division by zero\n"
    with pytest.raises(ValueError, match="the coding task runs whole programs"):
      require_interpreter(sandbox, "the coding task")


def test_bwrap_hides_files(bwrap):
  here = str(pathlib.Path(__file__).resolve())
  code = f"""
import os
for path in ({here!r}, "/root", "/home", "/etc/passwd", "/etc/shadow", "/var", {sys.prefix!r}):
  if path.startswith("/usr"): continue
  print(os.path.exists(path))
"""
  result = run(bwrap, code)
  assert result.status == "ok"
  assert set(result.output.split()) == {"False"}


def test_bwrap_hides_the_environment(bwrap, monkeypatch):
  monkeypatch.setenv("A_SECRET", "token")
  names = run(bwrap, "import os\nfor k in os.environ: print(k)").output.split()
  assert set(names) <= {"PATH", "LANG", "PWD", "LC_CTYPE"}


def test_bwrap_has_no_network(bwrap):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), 2).close()  # reachable from here
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
    result = run(bwrap, code)
  assert result.status == "error"
  assert "ConnectionRefusedError" in result.output or "unreachable" in result.output


def test_bwrap_limits_memory(bwrap):
  assert run(bwrap, "x = bytearray(1_200_000_000)\nprint(len(x))").status == "memory"


def test_bwrap_limits_scratch_space(bwrap):
  code = """
import os
for folder in ("/tmp", "/dev/shm"):
  written = 0
  try:
    for i in range(20):
      with open(f"{folder}/{i}", "wb") as f:
        written += f.write(bytes(10_000_000))
  except OSError as error:
    print(folder, written < 100_000_000)
"""
  assert run(bwrap, code).output == "/tmp True\n/dev/shm True\n"


def test_bwrap_limits_forks(bwrap):
  code = """
import os, time
n = 0
try:
  for _ in range(200):
    if os.fork() == 0:
      time.sleep(60)
      os._exit(0)
    n += 1
except OSError as error:
  print("stopped", n < 64)
else:
  print("forked", n)
"""
  assert run(bwrap, code).output == "stopped True\n"
  assert settled() == []


def test_bwrap_ends_daemons(bwrap):
  code = """
import os, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    time.sleep(60)
  os._exit(0)
print("left")
"""
  assert run(bwrap, code).output == "left\n"
  assert settled() == []


def test_bwrap_sees_no_other_process(bwrap):
  code = "import os\nprint(max(int(p) for p in os.listdir('/proc') if p.isdigit()) < 50)"
  result = run(bwrap, f"{code}\nos.kill({os.getpid()}, 0)")
  assert result.output.startswith("True\nProcessLookupError")


@pytest.mark.parametrize("backend", ["bwrap", "unsafe"])
def test_endless_loop_is_ended(backend):
  if backend == "bwrap" and _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  with make_sandbox(_config(backend, wall_seconds=1.0)) as sandbox:
    result = run(sandbox, "import signal\nsignal.alarm(0)\nprint('on')\nwhile True: pass")
    assert result.status == "timeout"
    assert 0.9 < result.seconds < 4.0
  assert settled() == []


def test_cpu_limit_is_a_timeout(bwrap):
  with make_sandbox(_config("bwrap", wall_seconds=30.0, cpu_seconds=1)) as sandbox:
    assert run(sandbox, "while True: pass").status == "timeout"


ENDS = {
  "import sys\nsys.exit(97)": "exit status 97",
  "import sys\nsys.exit(98)": "exit status 98",
  "import sys\nsys.exit('no')": "no\nexit status 1",
  "import os\nos._exit(97)": "exit status 97",
  "import os\nos._exit(137)": "exit status 137",
  "import os\nos._exit(152)": "exit status 152",
  "import os\nos._exit(1)": "exit status 1",
  "import os\nos.kill(os.getpid(), 9)": "killed by SIGKILL",
  "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)": "killed by SIGXCPU",
  "import os\nos.abort()": "killed by SIGABRT",
  "raise KeyboardInterrupt": "KeyboardInterrupt (line 2)",
  "raise GeneratorExit('x')": "GeneratorExit: x (line 2)",
  "import os\nif os.fork() == 0: raise MemoryError\nos.wait()\nos._exit(3)": (
    "MemoryError\nexit status 3"
  ),
}


@pytest.mark.parametrize("backend", ["bwrap", "unsafe"])
def test_an_end_that_the_code_chose_is_no_limit(backend):
  if backend == "bwrap" and _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  with make_sandbox(_config(backend)) as sandbox:
    for code, said in ENDS.items():
      result = run(sandbox, f"print('on', flush=True)\n{code}")
      assert (result.output, result.status) == (f"on\n{said}\n", "error"), code
    result = run(sandbox, "import sys\nprint('on')\nsys.exit(0)")
    assert (result.output, result.status) == ("on\n", "ok")
    # A runner that the code kills says nothing, and what is left is ended.
    assert (
      run(sandbox, "import os\nos.kill(os.getppid(), 9)\nimport signal; signal.pause()").status
      == "error"
    )
  assert settled() == []


@pytest.mark.parametrize("backend", ["bwrap", "unsafe"])
def test_an_end_that_a_limit_chose_is_that_limit(backend):
  if backend == "bwrap" and _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  with make_sandbox(_config(backend, wall_seconds=30.0, cpu_seconds=1)) as sandbox:
    ignored = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(sandbox, ignored).status == "timeout"
    assert run(sandbox, "while True: pass").status == "timeout"
  # A busy machine may need a second to fill the memory.
  with make_sandbox(_config(backend, wall_seconds=60.0, cpu_seconds=60)) as sandbox:
    result = run(sandbox, "x = bytearray(2_000_000_000)")
    assert (result.output, result.status) == ("MemoryError\n", "memory")
    # As the kernel does when the machine has less than the limit.
    held = f"import os\nx = bytearray({MEMORY_MB * 600_000})\nos.kill(os.getpid(), 9)"
    assert run(sandbox, held).status == "memory"


def test_output_is_cut_and_its_writer_killed(bwrap):
  start = time.perf_counter()
  result = run(bwrap, "for _ in range(1000): print('x' * 100_000)")
  assert result.status == "output_limit"
  assert len(result.output) == 64 * 1024
  assert time.perf_counter() - start < 5
  assert settled() == []


@pytest.mark.parametrize("path", ["/etc/x", "/usr/x", "/x", "/dev/x", "/proc/sys/kernel/hostname"])
def test_bwrap_is_read_only(bwrap, path):
  result = run(bwrap, f"open({path!r}, 'w').write('x')")
  assert result.status == "error"
  assert "Error" in result.output


def test_state_never_crosses_calls(bwrap):
  assert run(bwrap, "open('/tmp/left', 'w').write('x')\nx = 1").status == "ok"
  assert run(bwrap, "import os\nprint(os.listdir('/tmp'))").output == "[]\n"
  assert run(bwrap, "x").status == "error"


def test_cancelling_ends_the_process(bwrap):
  async def main():
    task = asyncio.create_task(bwrap.run("import time\ntime.sleep(60)"))
    while not processes():
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task

  asyncio.run(main())
  assert settled() == []


def test_one_spinning_call_does_not_hold_up_another(bwrap):
  async def main():
    spin = asyncio.create_task(bwrap.run("while True: pass"))
    start = time.perf_counter()
    result = await bwrap.run("1+1")
    seconds = time.perf_counter() - start
    spinning = not spin.done()
    spin.cancel()
    with pytest.raises(asyncio.CancelledError):
      await spin
    return result, seconds, spinning

  result, seconds, spinning = asyncio.run(main())
  assert result.output == "2\n"
  assert spinning
  assert seconds < 4


@pytest.mark.parametrize("backend", ["bwrap", "unsafe"])
def test_calls_in_line_and_slow_code_give_signs_of_life(backend):
  if backend == "bwrap" and _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  codes = ["import time\ntime.sleep(60)", "print(1)"]
  silences, patience = [], [Patience() for _ in codes]

  async def call(sandbox, code, p):
    with p.watching():
      return await asyncio.create_task(sandbox.run(code))

  async def main(sandbox):
    calls = [asyncio.ensure_future(call(sandbox, *x)) for x in zip(codes, patience, strict=True)]
    while not all(c.done() for c in calls):
      now = time.monotonic()
      silences.extend(now - p.last() for p, c in zip(patience, calls, strict=True) if not c.done())
      await asyncio.sleep(0.05)
    return [c.result().status for c in calls]

  with make_sandbox(_config(backend, wall_seconds=6.0, concurrency=1)) as sandbox:
    assert asyncio.run(main(sandbox)) == ["timeout", "ok"]
  assert max(silences) < 4.5  # what is left is the start of an interpreter
  assert patience[-1].queued > 5.9


def test_close_ends_what_runs():
  if _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  sandbox = make_sandbox(_config("bwrap", wall_seconds=60.0))

  async def main():
    task = asyncio.create_task(sandbox.run("import time\ntime.sleep(60)"))
    while not processes():
      await asyncio.sleep(0.01)
    await asyncio.to_thread(sandbox.close)
    with pytest.raises(SandboxFailure, match="cancelled"):
      await task
    with pytest.raises(SandboxFailure, match="closed"):
      await sandbox.run("1")

  start = time.perf_counter()
  asyncio.run(main())
  sandbox.close()
  assert time.perf_counter() - start < 20
  assert settled() == []


def test_cancelling_during_the_start_leaves_nothing_behind(bwrap):
  """At any moment of it: bubblewrap binds its processes to their parent's life one after another."""

  async def main():
    for delay in np.linspace(0.0, 0.08, 150):
      task = asyncio.create_task(bwrap.run("import time\ntime.sleep(60)"))
      await asyncio.sleep(delay)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task

  asyncio.run(main())
  assert settled() == []


@pytest.mark.parametrize("command", [["/bin/false"], ["/nonexistent/program"], ["/bin/echo", "no"]])
def test_broken_infrastructure_is_no_observation(command):
  sandbox = ProcessSandbox("broken", _config("bwrap"), command, isolated=True)
  with sandbox, pytest.raises(EnvFailure, match=r"broken|cannot start"):
    run(sandbox, "1+1")


def test_auto_falls_back_in_one_line(monkeypatch, caplog):
  monkeypatch.setenv("PATH", "/nonexistent")
  with caplog.at_level(logging.WARNING):
    sandbox = make_sandbox(SandboxConfig(backend="auto"))
  assert sandbox.name == "expr"
  assert len(caplog.records) == 1
  assert "bwrap is not installed" in caplog.text
  with pytest.raises(SandboxFailure, match="bwrap is not installed"):
    make_sandbox(SandboxConfig(backend="bwrap"))


def test_unsafe_says_what_it_does_not_cover(caplog):
  with caplog.at_level(logging.WARNING), make_sandbox(SandboxConfig(backend="unsafe")):
    assert "environment variables" in caplog.text
    assert "network" in caplog.text


def test_unknown_backend():
  with pytest.raises(ValueError, match="'docker': choose one of auto, bwrap, expr, unsafe"):
    make_sandbox(SandboxConfig(backend="docker"))


@pytest.mark.slow
def test_500_calls_leave_nothing_behind():
  if _bwrap_reason():
    pytest.skip(f"bwrap cannot run here: {_bwrap_reason()}")
  codes = [
    "1+1",
    "1/0",
    "import os\nif os.fork() == 0:\n  os.setsid()\n  import time\n  time.sleep(60)",
  ]
  with make_sandbox(_config("bwrap", concurrency=4)) as sandbox:
    asyncio.run(_many(sandbox, codes, 8))  # threads and event loop exist now
    before = descriptors()
    statuses = asyncio.run(_many(sandbox, codes, 500))
    assert descriptors() == before
  assert statuses.count("error") == 167
  assert statuses.count("ok") == 333
  assert settled() == []


async def _many(sandbox, codes, n):
  results = await asyncio.gather(*(sandbox.run(codes[i % len(codes)]) for i in range(n)))
  return [r.status for r in results]
