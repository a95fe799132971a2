"""How a command ends when it does not end well: exit statuses, and what leads to them.

Nothing here imports JAX.  A refused configuration (``config.ConfigError``) is status 2.
"""

import errno

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_AGAIN = 75  # EX_TEMPFAIL: run the same command again
EXIT_INTERRUPTED = 130


class RunFailed(RuntimeError):
  """A run that cannot go on; the message says why and what to do, so no traceback is needed."""


class Preempted(BaseException):
  """The run was asked to stop and did; no error, so that no ``except Exception`` takes it for one."""


def innermost(error: BaseException) -> BaseException:
  """What first went wrong."""
  while (inner := error.__cause__ or error.__context__) is not None:
    error = inner
  return error


def one_line(error: BaseException) -> str:
  """The innermost cause, in a line to print."""
  error = innermost(error)
  text = " ".join(str(error).split())
  return f"{type(error).__name__}: {text[:300]}"


def out_of_room(error: BaseException) -> bool:
  """Whether a disk or a quota is full.  Tensorstore raises no OSError: its text has the number."""
  error = innermost(error)
  full = (errno.ENOSPC, errno.EDQUOT)
  if isinstance(error, OSError):
    return error.errno in full
  return any(f"os_error_code='{number}'" in str(error) for number in full)
