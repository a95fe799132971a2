"""The environments by their names: the one match over ``env.name``."""

import functools
from collections.abc import Callable

from sao_jax.config import EnvConfig
from sao_jax.envs.base import Env
from sao_jax.envs.math_tool import MathTool, parse_reply
from sao_jax.envs.online_writing import OnlineWriting, make_judge
from sao_jax.envs.sandbox import Sandbox


def make_env(config: EnvConfig, sandbox: Sandbox | None = None) -> Callable[[], Env]:
  """A factory of single-use environments that share a sandbox, or a judge.

  Raises:
    ValueError: an unknown environment, a tool without a sandbox, or (ConfigError) a judge that
      cannot be had.
  """
  match config.name:
    case "math_tool":
      MathTool(config, sandbox)  # refuses a bad configuration now, not in the first episode
      parse_reply("", tool=config.tool, answer=config.answer)
      return functools.partial(MathTool, config, sandbox)
    case "online_writing":
      return functools.partial(OnlineWriting, make_judge(config), config.judge)
    case "coding":
      raise ValueError("env.name = 'coding' is not written yet: its presets resolve and do not run")
  raise ValueError(f"env.name = {config.name!r}: choose one of math_tool, online_writing")
