"""bubblewrap: every namespace of its own, an unprivileged user, a read-only system."""

import os
import shutil
import subprocess
import sys

from sao_jax.config import SandboxConfig
from sao_jax.envs.process import (
  FILE_BYTES,
  STARTED,
  ProcessSandbox,
  SandboxFailure,
  runner_arguments,
)

_SCRATCH_BYTES = 64 * 2**20  # all that the code may write


def bwrap_sandbox(config: SandboxConfig) -> ProcessSandbox:
  """A bwrap sandbox that has run an empty program, or SandboxFailure with the reason."""
  command = bwrap_command(config)
  probe = [*command, *runner_arguments(config, isolated=True)]
  try:
    result = subprocess.run(probe, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
  except (OSError, subprocess.TimeoutExpired) as error:
    raise SandboxFailure(f"bwrap does not start: {error}") from error
  if result.returncode or result.stdout != STARTED:
    reason = result.stderr.decode("utf-8", "replace").strip().splitlines()
    raise SandboxFailure(reason[-1] if reason else f"exit status {result.returncode}")
  return ProcessSandbox("bwrap", config, command, isolated=True)


def bwrap_command(config: SandboxConfig) -> list[str]:
  root = os.geteuid() == 0
  for program in ["bwrap", "prlimit", *(["setpriv"] if root else [])]:
    if shutil.which(program) is None:
      raise SandboxFailure(f"{program} is not installed")
  interpreter = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
  command = []
  if root:
    user = _unprivileged_id()
    command += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    command += ["--no-new-privs"]
  cpu = config.cpu_seconds
  command += ["prlimit", f"--as={config.memory_mb * 2**20}", f"--cpu={cpu}:{cpu + 1}"]
  command += [f"--fsize={FILE_BYTES}", "--nofile=64", "--core=0"]
  known = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=30).stdout
  sized = ["--size", str(_SCRATCH_BYTES)] if "--size" in known else []
  command += ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
  if "--disable-userns" in known:
    command += ["--unshare-user", "--disable-userns"]
  command += ["--clearenv", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"]
  command += ["--ro-bind", "/usr", "/usr"]
  for name in ("bin", "sbin", "lib", "lib64"):
    if os.path.islink(f"/{name}"):
      command += ["--symlink", f"usr/{name}", f"/{name}"]
    elif os.path.isdir(f"/{name}"):
      command += ["--ro-bind", f"/{name}", f"/{name}"]
  if not interpreter.startswith("/usr/"):
    command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    interpreter = os.path.realpath(interpreter)
  # Everything else is read-only, the new root too: scratch space has a size.
  command += ["--proc", "/proc", "--dev", "/dev", *sized, "--tmpfs", "/dev/shm", "--remount-ro"]
  command += ["/dev", *sized, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
  return [*command, interpreter]


def _unprivileged_id() -> int:
  """A user id that nobody has, one per process, so that runs cannot exhaust each other's limits."""
  with open("/proc/self/uid_map") as file:
    rows = [tuple(map(int, line.split())) for line in file]
  wanted = 1_900_000_000 + os.getpid()
  mapped = any(first <= wanted < first + count for first, _, count in rows)
  return wanted if mapped else 65534
