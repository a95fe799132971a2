"""How a command ends when it does not end well: exit statuses, and what leads to them.

Nothing here imports JAX.  A refused configuration (``config.ConfigError``) is status 2.
"""

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_AGAIN = 75  # EX_TEMPFAIL: run the same command again
EXIT_INTERRUPTED = 130


class RunFailed(RuntimeError):
  """A run that cannot go on; the message says why and what to do, so no traceback is needed."""


class Preempted(BaseException):
  """The run was asked to stop and did; no error, so that no ``except Exception`` takes it for one."""
