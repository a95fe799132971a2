"""Traces for a supervised start: the mixture, the layout, and what is trained."""

import collections

import numpy as np
import pytest

from sao_jax.config import ChatConfig, TaskConfig
from sao_jax.data.arithmetic import sum_of_products
from sao_jax.data.chat import make_chat
from sao_jax.data.tasks import make_source
from sao_jax.data.traces import Traces, encode_trace

CHAT = make_chat(ChatConfig())


def tool(code: str) -> str:
  """A calculator for expressions without parentheses."""
  return "error" if code.endswith("=") else str(sum_of_products(code))


def traces(good=0.45, seed=0, **task):
  return Traces(make_source(TaskConfig(eval_size=20, **task)), tool, good, seed)


def first_of_each_kind(source):
  found = {}
  for i in range(400):
    found.setdefault(source[i].kind, source[i])
  return found


def test_shares_of_the_mixture():
  source = traces()
  counts = collections.Counter(source[i].kind for i in range(3000))
  expected = {
    "good": 0.45,
    "lazy": 0.55 * 0.7,
    "drops_term": 0.55 * 0.15,
    "malformed": 0.55 * 0.1,
    "ignores_tool": 0.55 * 0.05,
  }
  assert set(counts) == set(expected)
  for kind, share in expected.items():
    assert abs(counts[kind] / 3000 - share) < 4 * (share * (1 - share) / 3000) ** 0.5


def test_each_kind_does_what_it_says():
  for kind, trace in first_of_each_kind(traces()).items():
    question = trace.messages[0]["content"]
    right = tool(question)
    said = [m["content"] for m in trace.messages[1:]]
    answer = said[-1].removeprefix("<answer>").removesuffix("</answer>")
    assert (answer == right) == (kind == "good") or kind == "drops_term"
    if kind == "lazy":
      assert len(said) == 1
      continue
    call = said[0].removeprefix("<python>").removesuffix("</python>")
    assert said[1] == tool(call)
    assert (call == question) == (kind in ("good", "ignores_tool"))
    if kind == "drops_term":
      assert question.startswith(call)
      assert answer == said[1]
    if kind == "malformed":
      assert call == question + "="


def test_encoding_equals_the_episode_and_trains_replies_only():
  trace = first_of_each_kind(traces())["good"]
  tokens, mask = encode_trace(trace, CHAT)
  question = trace.messages[0]["content"]
  value = tool(question)
  assert CHAT.decode(tokens) == (
    f"{question}=<python>{question}</python><output>{value}</output><answer>{value}</answer><eos>"
  )
  assert CHAT.decode(tokens[mask]) == f"<python>{question}</python><answer>{value}</answer><eos>"
  assert tokens[-1] == CHAT.eos_id
  assert mask[-1]
  assert (tokens.dtype, mask.dtype) == (np.int32, bool)


def test_deterministic():
  one, other = traces(), traces()
  assert [one[i] for i in range(20)] == [other[i] for i in range(19, -1, -1)][::-1]
  assert [traces(seed=1)[i] for i in range(20)] != [one[i] for i in range(20)]


def test_all_good_and_word_problems():
  assert {traces(good=1.0)[i].kind for i in range(50)} == {"good"}
  source = Traces(
    make_source(TaskConfig(kind="word_problem", eval_size=20)), lambda code: "7", 0.5, 0
  )
  for i in range(30):
    tokens, mask = encode_trace(source[i], CHAT)
    assert 0 < mask.sum() < len(tokens)


def test_refusals(tmp_path):
  with pytest.raises(ValueError, match=r"good_fraction = 1\.5"):
    traces(good=1.5)
  path = tmp_path / "a.jsonl"
  path.write_text('{"problem": "x", "answer": "1"}\n')
  source = make_source(TaskConfig(source="jsonl", path=str(path), eval_size=0))
  with pytest.raises(ValueError, match=r"set sft\.steps = 0"):
    Traces(source, tool, 0.5, 0)
