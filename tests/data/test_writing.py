"""Writing: prompts that do not tell the style, phases by serial, traces of all styles."""

import collections
import random

import pytest

from sao_jax.config import ChatConfig, TaskConfig
from sao_jax.data.chat import make_chat
from sao_jax.data.tasks import make_source, task_stream
from sao_jax.data.traces import Traces, encode_trace
from sao_jax.data.writing import FAULTS, SHARES
from sao_jax.envs.online_writing import faults, style_of
from sao_jax.lexicon import STYLES, TOPICS

CHAT = make_chat(ChatConfig())
STYLES_IN_TURN = ("cute", "chuunibyou", "classical")


def config(**changes):
  return TaskConfig(source="writing", **{"eval_size": 32, "phase_length": 100} | changes)


def wanted(stream, serials):
  return [stream[s].meta["style"] for s in serials]


def test_held_out_pairs_never_occur_in_training_and_want_the_last_style():
  train, held_out = make_source(config()), make_source(config(), "eval")
  assert (len(train), len(held_out)) == (88, 32)
  pairs = [source[i].meta["topic"] for source in (train, held_out) for i in range(len(source))]
  assert len({frozenset(pair) for pair in pairs}) == 120
  assert {word for pair in pairs for word in pair} == set(TOPICS)
  assert {held_out[i].meta["style"] for i in range(32)} == {"classical"}
  assert {held_out[i].meta["phase"] for i in range(32)} == {2}
  with pytest.raises(ValueError, match=r"task\.eval_size = 120 holds out all of the 120 pairs"):
    make_source(config(eval_size=120))


def test_the_prompt_names_the_topic_only():
  task = task_stream(make_source(config()), 0)[0]
  assert task.prompt == [{"role": "user", "content": ", ".join(task.meta["topic"])}]
  assert task.id == f"writing:{task.meta['question']}"
  again = task_stream(make_source(config(styles=("classical",))), 0)[0]
  assert (again.prompt, again.id, again.meta["style"]) == (task.prompt, task.id, "classical")
  told = task_stream(make_source(config(prompt="write about {question}")), 0)[0]
  assert told.prompt[0]["content"] == f"write about {task.meta['question']}"


def test_a_phase_is_a_stretch_of_serials():
  """Epochs of 88 tasks, each shuffled anew, and phases of 100: neither follows the other."""
  stream = task_stream(make_source(config()), 3)
  styles = wanted(stream, range(500))
  assert styles == ["cute"] * 100 + ["chuunibyou"] * 100 + ["classical"] * 300
  assert [stream[s].meta["phase"] for s in (0, 99, 100, 199, 200, 10**6)] == [0, 0, 1, 1, 2, 2]
  epochs = [[stream[s].id for s in range(e * 88, e * 88 + 88)] for e in range(3)]
  assert epochs[0] != epochs[1] != epochs[2]
  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
  # The same pair in another phase is the same prompt with another wish.
  pair = stream[0].id
  seen = {s: stream[s].meta["style"] for s in range(264) if stream[s].id == pair}
  assert list(seen.values()) == [STYLES_IN_TURN[min(s // 100, 2)] for s in seen]
  assert len(set(seen.values())) > 1


def test_phases_survive_a_restart_in_any_order():
  """A resumed run makes its stream anew and asks for the serials it still needs, in any order."""
  before = task_stream(make_source(config()), 7)
  tasks = {s: before[s] for s in range(300)}
  after = task_stream(make_source(config()), 7)
  for serial in random.Random(0).sample(range(300), 300):
    assert after[serial] == tasks[serial]
    assert after[serial].meta["phase"] == serial // 100


def test_styles_may_come_back():
  stream = task_stream(make_source(config(styles=("cute", "academic", "cute"), phase_length=5)), 0)
  assert wanted(stream, (0, 5, 10, 99)) == ["cute", "academic", "cute", "cute"]
  assert stream[10].meta["phase"] == 2


def traces(good=0.6, seed=0):
  return Traces(make_source(config()), lambda code: "", good, seed)


def test_traces_are_what_their_kind_says():
  """As the judge sees them: what a kind spoils is the one thing that it spoils."""
  expected = {
    "good": [],
    "mixes": [],
    "off_topic": ["topic"],
    "repeats": ["repeat"],
    "misspells": ["lexicon"],
    "too_short": ["length"],
    "no_stop": ["stop"],
  }
  source, kinds = traces(), collections.Counter()
  styles: collections.Counter[str | None] = collections.Counter()
  for i in range(3000):
    trace = source[i]
    text = trace.messages[-1]["content"]
    topic = trace.messages[0]["content"].split(", ")
    assert faults(topic, text) == expected[trace.kind]
    kinds[trace.kind] += 1
    if trace.kind == "good":
      styles[style_of(text)] += 1
    assert (style_of(text) is None) == (trace.kind in ("mixes", "misspells"))
  shares = {"good": 0.6} | dict.fromkeys(FAULTS, 0.4 / 6)
  assert set(kinds) == set(shares) == set(expected)
  for kind, share in shares.items():
    assert abs(kinds[kind] / 3000 - share) < 4 * (share * (1 - share) / 3000) ** 0.5
  total = sum(styles.values())
  assert set(styles) == set(SHARES) == set(STYLES)
  for style, share in SHARES.items():
    assert abs(styles[style] / total - share) < 4 * (share * (1 - share) / total) ** 0.5


def test_no_trace_exceeds_the_budget_or_the_vocabulary():
  source = traces(good=0.3, seed=5)
  for i in range(1000):
    tokens, mask = encode_trace(source[i], CHAT)
    text = source[i].messages[-1]["content"]
    assert CHAT.decode(tokens[mask]) == f"{text}<eos>"
    assert len(tokens) <= 48
    assert mask.sum() <= 36


def test_traces_are_deterministic():
  one, other = traces(), traces()
  assert [one[i] for i in range(20)] == [other[i] for i in range(19, -1, -1)][::-1]
