"""How a command ends when it does not end well: exit statuses, and what leads to them.

Nothing here imports JAX.  A refused configuration (``config.ConfigError``) is status 2.
"""

import errno
import os

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
  """The innermost cause, in a line to print; a full disk is said first, before tensorstore's paths."""
  number = _full(error)
  error = innermost(error)
  text = " ".join(str(error).split())[:300]
  if number and os.strerror(number) not in text:
    text = f"{os.strerror(number)}: {text}"
  return f"{type(error).__name__}: {text}"


def out_of_room(error: BaseException) -> bool:
  """Whether a disk or a quota is full."""
  return _full(error) is not None


def _full(error: BaseException) -> int | None:
  """The system's number of it.  Tensorstore raises no OSError: its text has the number."""
  error = innermost(error)
  for number in (errno.ENOSPC, errno.EDQUOT):
    if isinstance(error, OSError) and error.errno == number:
      return number
    if not isinstance(error, OSError) and f"os_error_code='{number}'" in str(error):
      return number
  return None
