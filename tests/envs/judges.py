"""Judges as a user would write them, named in tests as ``tests.envs.judges:…``."""

import math

from sao_jax.envs.base import EnvFailure
from sao_jax.envs.online_writing import Verdict

NOT_A_FUNCTION = 3


class Lengths:
  """Likes long texts; one object for all episodes."""

  def __init__(self, most):
    self.most, self.calls = most, 0

  async def __call__(self, task, text, /):
    self.calls += 1
    return Verdict(min(len(text) / self.most, 1.0), 0.5, {"calls": float(self.calls)})


def lengths(config):
  return Lengths(config.max_turn_tokens)


def broken(config):
  raise OSError("no such server")


def nothing(config):
  return None


def always(verdict):
  """A factory of judges that say the same to everything, or raise it."""

  async def judge(task, text, /):
    if isinstance(verdict, Exception):
      raise verdict
    return verdict

  return lambda config: judge


unreachable = always(EnvFailure("the service is down"))
refused = always(ConnectionRefusedError("port 8000"))
defect = always(KeyError("score"))
nan = always(Verdict(math.nan, 1.0))
high = always(Verdict(1.0, 1.5))
low = always(Verdict(-0.1, 1.0))
text = always(Verdict("good", 1.0))
metric = always(Verdict(1.0, 1.0, {"tone": math.inf}))
number = always(1.0)
