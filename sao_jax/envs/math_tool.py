"""Mathematics with a Python tool: ``<python>…</python>`` calls it, ``<answer>…</answer>`` answers.

The reward is 1 for a correct answer and 0 otherwise; it is graded once, when the episode ends.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

from sao_jax.config import EnvConfig
from sao_jax.envs.base import Step
from sao_jax.envs.grading import correct
from sao_jax.envs.pool import WorkerPool
from sao_jax.envs.sandbox import Sandbox, SandboxResult
from sao_jax.latex import last_boxed
from sao_jax.types import Message, Task

# As many as may ask sympy at once; more would wait inside, where no deadline can see them wait.
_graders = WorkerPool(2, "grader")

_CALL = re.compile(r"<python>(?P<tag>.*?)</python>|```(?:python|py)[ \t]*\n(?P<fence>.*?)```", re.S)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
_TRACE_OF_CALL = re.compile(r"</?python>|```(?:python|py)\b")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LINE = re.compile(r"[ \t]*([-+]?\d[\d,]*(?:\.\d+)?)[ \t]*\r?\n")


@dataclasses.dataclass(frozen=True)
class Reply:
  """What one reply asks for: the first complete element counts, a call or an answer."""

  call: str | None = None
  answer: str | None = None
  malformed: bool = False


def parse_reply(content: str, *, tool: bool, answer: str) -> Reply:
  """Reads a reply.

  Args:
    content: what the model said.
    tool: whether it may call the tool; if not, calls are text like any other.
    answer: ``tag`` <answer>…</answer>, ``boxed`` the last \\boxed{…}, or ``line`` exactly one
      number and the end of its line, which reads 1,200 as 1200 and +05 as 5.
  """
  if answer == "line":
    line = _LINE.match(content)
    found, at = (_plain_number(line[1]), line.start()) if line else (None, 0)
  elif answer == "boxed":
    found, at = last_boxed(content), content.rfind("\\boxed")
  elif answer == "tag":
    tag = _ANSWER.search(content)
    found, at = (tag[1].strip(), tag.start()) if tag else (None, 0)
  else:
    raise ValueError(f"env.answer = {answer!r}: choose one of tag, line, boxed")
  if not tool:
    return Reply(answer=found)
  call = _CALL.search(content)
  if call is not None and (found is None or call.start() < at):
    return Reply(call=call["tag"] if call["tag"] is not None else call["fence"])
  if found is None and _TRACE_OF_CALL.search(content):
    return Reply(malformed=True)
  return Reply(answer=found)


def _plain_number(text: str) -> str:
  """A number without commas between thousands, leading zeros and a plus; all else as it is."""
  text = text.strip()
  if _GROUPED.fullmatch(text):
    text = text.replace(",", "")
  if not re.fullmatch(r"[-+]?\d+(?:\.\d+)?", text):
    return text
  sign, digits = "-" * text.startswith("-"), text.lstrip("+-").lstrip("0")
  digits = digits if digits[:1].isdigit() else "0" + digits  # 0, and 0.5
  return "0" if digits == "0" else sign + digits


def shown(text: str, limit: int) -> str:
  """An observation as the model sees it: of more than ``limit`` characters, "..." ends them.

  Whatever imitates the tool, such as a supervised trace, must cut by this too.
  """
  if len(text) <= limit:
    return text
  return text[: max(0, limit - 3)] + "..."[:limit]


class MathTool:
  """One episode of one problem.

  A reply with a call is answered by what the code printed; a reply with an answer ends the episode,
  and so does one with neither.  A malformed call is told so.  How many turns there may be is the
  episode's budget, which its caller keeps.
  """

  def __init__(self, config: EnvConfig, sandbox: Sandbox | None) -> None:
    if config.tool and sandbox is None:
      raise ValueError("env.tool = True needs a sandbox; set env.tool = False to do without")
    self._config, self._sandbox = config, sandbox
    self._task: Task | None = None
    self._done = False

  async def reset(self, task: Task) -> list[Message]:
    if self._task is not None:
      raise RuntimeError("an environment is single use: make a new one for each episode")
    self._task = task
    return list(task.prompt)

  async def step(self, reply: Message) -> Step:
    if self._task is None or self._done:
      raise RuntimeError("step() before reset(), or after the episode was done or closed")
    read = parse_reply(reply["content"], tool=self._config.tool, answer=self._config.answer)
    if read.malformed:
      return self._observe("error: malformed call", {"calls": 1.0, "malformed_calls": 1.0})
    if read.call is not None:
      assert self._sandbox is not None
      result = await self._sandbox.run(read.call)  # SandboxFailure is an EnvFailure: it passes
      return self._observe(
        self._describe(result),
        {
          "calls": 1.0,
          "failed_calls": float(result.status != "ok"),
          "tool_seconds": result.seconds,
        },
      )
    self._done = True
    if read.answer is None:
      return Step([], 0.0, True, {"answered": 0.0, "correct": 0.0})
    reference = str(self._task.meta["answer"])
    if self._config.grade == "exact":
      if self._config.answer == "line":  # the answer was read so as well
        reference = _plain_number(reference)
      right = correct(read.answer, reference, "exact")
    else:  # may wait for a process of its own; other episodes must not wait with it
      right = await _graders.submit(
        functools.partial(_grade, read.answer, reference, self._config.grade)
      ).result()
    return Step([], float(right), True, {"answered": 1.0, "correct": float(right)})

  async def close(self) -> None:
    self._done = True

  def _observe(self, text: str, metrics: dict[str, float]) -> Step:
    message = Message(role="tool", content=shown(text, self._config.max_observation))
    return Step([message], 0.0, False, metrics)

  def _describe(self, result: SandboxResult) -> str:
    output = result.output.strip("\n")
    reason = {
      "timeout": "error: time limit exceeded",
      "memory": "error: memory limit exceeded",
      "output_limit": "error: too much output",
    }.get(result.status)
    if reason is None:
      return output or "(no output)"
    # The reason comes first, so that no amount of output can cut it off.
    return f"{reason}\n{output}" if output else reason


def _grade(answer: str, reference: str, method: str, beat: Callable[[], None]) -> bool:
  return correct(answer, reference, method)  # its own limits end it; it cannot tell meanwhile
