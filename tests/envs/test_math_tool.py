"""Whole episodes of the tool environment, by hand."""

import asyncio
import time

import pytest

from sao_jax.config import EnvConfig, SandboxConfig
from sao_jax.envs import math_tool
from sao_jax.envs.base import EnvFailure
from sao_jax.envs.make import make_env
from sao_jax.envs.math_tool import MathTool, Reply, parse_reply, shown
from sao_jax.envs.pool import Patience
from sao_jax.envs.process import ProcessSandbox
from sao_jax.envs.sandbox import make_sandbox
from sao_jax.types import Message, Task

TASK = Task("t", [Message(role="user", content="12+3*4")], {"answer": "24"})


def play(config, *contents, task=TASK, sandbox=None):
  """The steps that these replies lead to."""

  async def main():
    used = sandbox or make_sandbox(SandboxConfig(backend="expr"))
    env = make_env(config, used)()
    assert await env.reset(task) == task.prompt
    steps = [await env.step(Message(role="assistant", content=c)) for c in contents]
    await env.close()
    await env.close()
    return steps

  return asyncio.run(main())


def test_call_then_answer():
  call, answer = play(EnvConfig(), "<python>12+3*4</python>", "<answer>24</answer>")
  assert call.messages == [{"role": "tool", "content": "24"}]
  assert (call.reward, call.done) == (0.0, False)
  assert call.metrics["calls"] == 1
  assert call.metrics["failed_calls"] == 0
  assert (answer.messages, answer.reward, answer.done) == ([], 1.0, True)
  assert answer.metrics == {"answered": 1.0, "correct": 1.0}


@pytest.mark.parametrize(
  ("reply", "reward", "answered"),
  [
    ("<answer>24</answer>", 1.0, 1.0),
    ("<answer> 24 </answer>", 1.0, 1.0),
    ("<answer>25</answer>", 0.0, 1.0),
    ("<answer>25</answer><answer>24</answer>", 0.0, 1.0),
    ("24", 0.0, 0.0),
    ("<answer>24", 0.0, 0.0),
    ("", 0.0, 0.0),
  ],
)
def test_answers(reply, reward, answered):
  (step,) = play(EnvConfig(), reply)
  assert (step.reward, step.done) == (reward, True)
  assert step.metrics["answered"] == answered


@pytest.mark.parametrize("reply", ["<python>12", "12</python>", "```python\n12"])
def test_malformed_call_is_an_observation(reply):
  step, answer = play(EnvConfig(), reply, "<answer>24</answer>")
  assert step.messages == [{"role": "tool", "content": "error: malformed call"}]
  assert (step.done, step.metrics["malformed_calls"]) == (False, 1.0)
  assert answer.reward == 1.0


def test_fence_and_failed_call():
  fence, failed = play(EnvConfig(), "Let me see.\n```python\n1+1\n```\n", "<python>1/0</python>")
  assert fence.messages[0]["content"] == "2"
  assert failed.messages[0]["content"] == "ZeroDivisionError: division by zero"
  assert failed.metrics["failed_calls"] == 1.0
  assert not failed.done


def test_an_answer_given_before_the_tool_spoke_does_not_count():
  (step,) = play(EnvConfig(), "<python>12+3*4</python> so <answer>24</answer>")
  assert not step.done
  assert step.messages[0]["content"] == "24"


def test_observations_are_cut():
  (step,) = play(EnvConfig(max_observation=10), "<python>2**200</python>")
  assert step.messages[0]["content"] == str(2**200)[:7] + "..." == shown(str(2**200), 10)
  assert [shown("abcde", n) for n in (5, 4, 3, 2, 0)] == ["abcde", "a...", "...", "..", ""]


def test_without_the_tool_calls_are_text():
  (step,) = play(EnvConfig(tool=False), "<python>1</python><answer>24</answer>")
  assert (step.reward, step.done) == (1.0, True)
  (step,) = play(EnvConfig(tool=False), "<python>1</python>")
  assert (step.reward, step.done) == (0.0, True)


@pytest.mark.parametrize(
  ("reply", "reward"),
  [("24\n", 1.0), (" 24\n", 1.0), ("24", 0.0), ("24 apples\n", 0.0), ("is 24\n", 0.0), ("\n", 0.0)],
)
def test_line_is_strict(reply, reward):
  (step,) = play(EnvConfig(tool=False, answer="line"), reply)
  assert (step.reward, step.done) == (reward, True)


@pytest.mark.parametrize(
  ("line", "answer"),
  [
    ("1,200", "1200"),
    ("-1,234,567.50", "-1234567.50"),
    ("+5", "5"),
    ("05", "5"),
    ("-05", "-5"),
    ("+1,200", "1200"),
    ("-0", "0"),
    ("00", "0"),
    ("0.5", "0.5"),
    ("00.5", "0.5"),
    ("1200", "1200"),
    ("1,2", "1,2"),
    ("12,00", "12,00"),
    ("1200,000", "1200,000"),
  ],
)
def test_line_reads_a_number_however_it_is_written(line, answer):
  assert parse_reply(line + "\n", tool=False, answer="line") == Reply(answer=answer)


@pytest.mark.parametrize(
  ("reply", "reference", "reward"),
  [
    ("1,200\n", "1200", 1.0),
    ("1200\n", "1,200", 1.0),
    ("+5\n", "5", 1.0),
    ("05\n", "5", 1.0),
    ("5\n", "05", 1.0),
    ("-5\n", "5", 0.0),
    ("50\n", "5", 0.0),
    ("1,2\n", "12", 0.0),
    ("5.0\n", "5", 0.0),
  ],
)
def test_line_and_exact_compare_numbers(reply, reference, reward):
  task = Task("t", [], {"answer": reference})
  (step,) = play(EnvConfig(tool=False, answer="line"), reply, task=task)
  assert step.reward == reward


def test_boxed_and_math():
  config = EnvConfig(tool=False, answer="boxed", grade="math")
  task = Task("t", [], {"answer": r"\frac{3}{2}"})
  (step,) = play(config, r"Thus \boxed{1} … \boxed{1.5}.", task=task)
  assert step.reward == 1.0
  (step,) = play(config, "1.5", task=task)
  assert (step.reward, step.metrics["answered"]) == (0.0, 0.0)


def test_answers_that_are_slow_to_grade_make_the_others_wait_in_a_line(monkeypatch):
  def slow(answer, reference, method):
    time.sleep(0.2)
    return answer == reference

  monkeypatch.setattr(math_tool, "correct", slow)
  config = EnvConfig(tool=False, grade="math")
  patience = [Patience() for _ in range(6)]

  async def grade(p: Patience) -> float:
    env = make_env(config)()
    await env.reset(TASK)
    with p.watching():
      step = asyncio.ensure_future(
        env.step({"role": "assistant", "content": "<answer>24</answer>"})
      )
    return (await step).reward

  async def main() -> list[float]:
    return await asyncio.gather(*map(grade, patience))

  assert asyncio.run(main()) == [1.0] * 6
  waits = [p.queued for p in patience]
  assert max(waits[:2]) < 0.35 < min(waits[4:])


def test_what_a_limit_cut_is_said_first():
  config = SandboxConfig(backend="unsafe", wall_seconds=0.5)
  with make_sandbox(config) as sandbox:
    (step,) = play(
      EnvConfig(max_observation=40),
      "<python>print('x' * 99, flush=True)\nwhile True: pass</python>",
      sandbox=sandbox,
    )
  assert step.messages[0]["content"] == "error: time limit exceeded\nxxxxxxxxxx..."


def test_a_broken_sandbox_is_a_failure_not_a_reward():
  broken = ProcessSandbox("broken", SandboxConfig(), ["/bin/false"], isolated=True)
  with broken, pytest.raises(EnvFailure, match="did not run the code"):
    play(EnvConfig(), "<python>1</python>", sandbox=broken)


def test_misuse_is_named():
  with pytest.raises(ValueError, match=r"env\.tool = True needs a sandbox"):
    make_env(EnvConfig(), None)
  with pytest.raises(ValueError, match="'chess': choose one of math_tool, online"):
    make_env(EnvConfig(name="chess"))
  with pytest.raises(ValueError, match="'free': choose one of tag, line, boxed"):
    make_env(EnvConfig(tool=False, answer="free"))

  async def twice():
    env = MathTool(EnvConfig(tool=False), None)
    await env.reset(TASK)
    with pytest.raises(RuntimeError, match="single use"):
      await env.reset(TASK)
    await env.step(Message(role="assistant", content="<answer>1</answer>"))
    with pytest.raises(RuntimeError, match="after the episode was done"):
      await env.step(Message(role="assistant", content="<answer>1</answer>"))

  asyncio.run(twice())


def test_first_complete_element_counts():
  assert parse_reply("<answer>1</answer><python>2</python>", tool=True, answer="tag") == Reply(
    answer="1"
  )
  assert parse_reply("<python>2</python><answer>1</answer>", tool=True, answer="tag") == Reply(
    call="2"
  )
