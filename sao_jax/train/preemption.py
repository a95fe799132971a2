"""SIGTERM: save, and leave with a status that says "run me again".

Kubernetes and SLURM send SIGTERM before they take a machine away, and kill half a minute later.
Status 0 would tell them that the run is complete; 75 (EX_TEMPFAIL) asks to be started again.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from sao_jax.outcome import EXIT_AGAIN, Preempted

GRACE_SECONDS = 25.0  # from the signal to the exit, whatever the run is doing


class Preemption:
  """Listens for SIGTERM while entered.

  Loops ask ``requested`` between two steps, save and raise ``Preempted``.  Work that cannot be
  asked (a compilation, a step of minutes) is given up after ``grace`` seconds: the process leaves
  with status 75 by itself and the last checkpoint counts.

  Args:
    grace: seconds from the signal to the exit.
    report: gets one line when the signal comes, and one when the grace is over.
  """

  def __init__(
    self, grace: float = GRACE_SECONDS, report: Callable[[str], None] | None = None
  ) -> None:
    self.requested = threading.Event()
    self._grace = grace
    self._report = report or (lambda line: print(line, file=sys.stderr, flush=True))
    self._left = threading.Event()

  def check(self, where: str) -> None:
    """Raises Preempted if the run was asked to stop; ``where`` says what a new start goes on from."""
    if self.requested.is_set():
      raise Preempted(where)

  @contextlib.contextmanager
  def listening(self) -> Iterator["Preemption"]:
    """Only the main thread can listen; elsewhere (a notebook's worker, a test) nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
      yield self
      return
    # The C handler writes to the pipe at once; Python's own would have to wait for a compilation.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handler = signal.signal(signal.SIGTERM, lambda *_: self.requested.set())
    thread = threading.Thread(target=self._watch, args=(reader,), name="preemption", daemon=True)
    thread.start()
    try:
      yield self
    finally:
      self._left.set()
      signal.signal(signal.SIGTERM, old_handler)
      signal.set_wakeup_fd(old_writer)
      os.close(writer)  # ends the thread's read
      thread.join()
      os.close(reader)

  def _watch(self, reader: int) -> None:
    while data := os.read(reader, 1):
      if data[0] == signal.SIGTERM:
        break
    else:
      return
    self.requested.set()
    self._report("sao-jax: SIGTERM: saving and leaving")
    if not self._left.wait(self._grace):
      self._report(
        f"sao-jax: what the run is doing did not end within {self._grace:g} s: leaving without it. The "
        "last checkpoint counts; run the same command to go on."
      )
      os._exit(EXIT_AGAIN)
