"""Conversations of a file: the layout of episodes, full rows, once an epoch, addressable."""

import gzip
import hashlib
import json
import random

import numpy as np
import pytest

from sao_jax.config import ChatConfig, Config
from sao_jax.data.chat import make_chat
from sao_jax.data.conversations import ConversationBatches, encode_conversation, fill_batches
from sao_jax.data.packing import BatchSpec, pack, unpack
from sao_jax.types import Version

CHAT = make_chat(ChatConfig())


def messages(*turns):
  return {"messages": [{"role": role, "content": content} for role, content in turns]}


def call(question, output, answer):
  return messages(
    ("user", question),
    ("assistant", f"<python>{question}</python>"),
    ("tool", output),
    ("assistant", f"<answer>{answer}</answer>"),
  )


def question_of_length(tokens):
  """A conversation of exactly so many tokens: question, '=', one digit and the end."""
  return messages(("user", "1" * (tokens - 3)), ("assistant", "2"))


@pytest.fixture
def write(tmp_path):
  def to(*rows, name="a.jsonl"):
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)

  return to


def batches(path, rows=4, length=24, segments=64, seed=0, report=print):
  return ConversationBatches(path, CHAT, BatchSpec(rows, segments, (length,)), seed, report)


def numbers(batch):
  return [episode.task_serial for episode in batch]


def test_layout_of_an_episode_and_loss_on_replies_only(write):
  path = write(call("1+2", "3", "3"), "", call("4*5", "20", "21"), name="a.jsonl.gz")
  batch = batches(path, length=64)[0]
  first = next(e for e in batch if e.episode_id == "line-1")
  assert {e.episode_id for e in batch} == {"line-1", "line-3"}
  tokens, mask = first.trajectories[0].tokens, first.trajectories[0].action_mask
  assert CHAT.decode(tokens) == (
    "1+2=<python>1+2</python><output>3</output><answer>3</answer><eos>"
  )
  assert CHAT.decode(tokens[mask]) == "<python>1+2</python><answer>3</answer><eos>"
  assert set(first.trajectories[0].policy_version[mask]) == {0}
  assert set(first.trajectories[0].policy_version[~mask]) == {-1}
  assert first.incarnation == 0


def test_turns_that_are_not_trained():
  row = call("1+2", "3", "4")
  row["messages"][3]["trained"] = False
  tokens, mask = encode_conversation(row, CHAT)
  assert CHAT.decode(tokens[mask]) == "<python>1+2</python>"
  assert CHAT.decode(tokens).endswith("<answer>4</answer><eos>")


def test_what_follows_the_last_reply_is_left_out():
  row = messages(("system", "add"), ("user", "1+2"), ("assistant", "3"), ("user", "thanks"))
  tokens, mask = encode_conversation(row, CHAT)
  assert CHAT.decode(tokens) == "add\n1+2=3<eos>"
  assert mask.sum() == 2


def test_each_conversation_once_an_epoch_in_another_order(write):
  rng = random.Random(0)
  path = write(*(question_of_length(rng.randint(4, 24)) for _ in range(101)))
  source = batches(path)
  assert len(source) == 101
  orders, step = [], 0
  for epoch in range(3):
    count = source.steps_per_epoch(epoch)
    orders.append([n for s in range(step, step + count) for n in numbers(source[s])])
    step += count
  assert step == source.total_steps(3)
  assert all(sorted(order) == list(range(101)) for order in orders)
  assert orders[0] != orders[1] != orders[2] != list(range(101))


def test_steps_are_a_function_of_seed_and_step(write):
  rng = random.Random(1)
  path = write(*(question_of_length(rng.randint(4, 24)) for _ in range(50)))
  one, other = batches(path), batches(path)
  steps = range(one.total_steps(2))
  assert [numbers(one[s]) for s in steps] == [numbers(other[s]) for s in reversed(steps)][::-1]
  assert [numbers(batches(path, seed=1)[s]) for s in range(4)] != [
    numbers(one[s]) for s in range(4)
  ]
  with pytest.raises(IndexError, match="step -1"):
    one[-1]


def test_batches_are_what_pack_places_and_nearly_full(write):
  rng = random.Random(2)
  path = write(*(question_of_length(rng.randint(4, 24)) for _ in range(200)))
  source, config = batches(path), Config()
  spec = BatchSpec(4, 64, (24,))
  fills = []
  for step in range(source.steps_per_epoch(0)):
    episodes = source[step]
    batch, metrics = pack(episodes, Version(0, 0), config, spec=spec)
    assert batch.tokens.shape == (4, 24)
    placed = sorted(tuple(part["tokens"]) for part in unpack(batch))
    assert placed == sorted(tuple(e.trajectories[0].tokens) for e in episodes)
    fills.append(metrics["batch/fill"])
  assert np.mean(fills[:-1]) > 0.75


def test_a_batch_closes_where_the_longest_first_would_not_fit():
  """First fit in this order fills both rows of 12 exactly; the longest first would not place 3."""
  sizes = [5, 4, 3, 6, 3, 3]
  spec = BatchSpec(2, 16, (12,))
  plan = fill_batches(range(6), sizes, spec)
  assert [i for batch in plan for i in batch] == list(range(6))
  assert all(spec.fits([sizes[i] for i in batch]) for batch in plan)
  sizes = [3, 3, 6, 4, 4, 4]  # rows 3+3+6 and 4+4+4; the longest first: 6+4, 4+4+3, and 3 too many
  assert not spec.fits(sizes)
  assert fill_batches(range(6), sizes, spec) == [[0, 1, 2, 3, 4], [5]]


def test_no_more_conversations_in_a_batch_than_it_has_room_for(write):
  path = write(*(question_of_length(4) for _ in range(10)))
  assert [len(batches(path, segments=3)[s]) for s in range(4)] == [3, 3, 3, 1]


def test_too_long_ones_are_counted_and_left_out(write):
  path = write(question_of_length(25), question_of_length(24), question_of_length(30))
  said = []
  source = batches(path, report=said.append)
  assert (len(source), source.skipped) == (1, 2)
  assert len(said) == 1
  assert "2 of 3 conversations are longer than the longest row of 24 tokens (up to 30)" in said[0]
  with pytest.raises(ValueError, match=r"2 of 2 conversations .* packing\.lengths"):
    batches(write(question_of_length(25), question_of_length(30)))


def test_fingerprint_is_of_the_bytes(write, tmp_path):
  path = write(question_of_length(5), name="a.jsonl.gz")
  expected = hashlib.sha256((tmp_path / "a.jsonl.gz").read_bytes()).hexdigest()
  assert batches(path).fingerprint == expected


GOOD = call("1+2", "3", "3")
HI = {"role": "user", "content": "1"}
BAD = {
  "no json": ("{", "Expecting"),
  "no messages": ({"text": "x"}, r"found \['text'\]"),
  "a list": ([1], "found list"),
  "empty": ({"messages": []}, "found"),
  "role": (messages(("user", "1"), ("bot", "2")), "message 2: role 'bot': choose one of system"),
  "content": ({"messages": [{"role": "user", "content": None}]}, "content must be text"),
  "message": ({"messages": ["hi"]}, "message 1: expected an object, found str"),
  "calls": (
    {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
    "write the call into the content",
  ),
  "no reply": (messages(("user", "1")), "none of 1 messages"),
  "starts with a reply": (messages(("assistant", "1")), "message 1 of the assistant"),
  "two replies": (
    messages(("user", "1"), ("assistant", "1"), ("assistant", "2")),
    "message 3 of the assistant answers nothing",
  ),
  "nothing trained": (
    {"messages": [HI, {"role": "assistant", "content": "2", "trained": False}]},
    "none of 2 messages",
  ),
  "trained user": ({"messages": [HI | {"trained": True}]}, "only assistants learn"),
  "trained text": ({"messages": [HI | {"trained": "no"}]}, "must be true or false"),
  "unknown character": (messages(("user", "1É"), ("assistant", "2")), "'É'"),
  "stop inside": (
    messages(("user", "1"), ("assistant", "<python>1</python>2")),
    "goes on after '</python>'",
  ),
}


@pytest.mark.parametrize("what", BAD)
def test_refusals_name_file_line_and_reason(what, write):
  row, reason = BAD[what]
  path = write(GOOD, "", row)
  with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: .*{reason}"):
    batches(path)


def test_files_that_hold_nothing(write, tmp_path):
  with pytest.raises(ValueError, match=r"a\.jsonl is empty"):
    batches(write("", ""))
  with pytest.raises(FileNotFoundError):
    batches(str(tmp_path / "none.jsonl"))
  (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
  with pytest.raises(ValueError, match="no whole gzip file"):
    batches(str(tmp_path / "b.jsonl.gz"))
