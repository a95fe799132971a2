"""Labelled solutions: both formats, a split by question, corpora that contain each other."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from sao_jax.config import ChatConfig, Config, TaskConfig
from sao_jax.data.chat import make_chat
from sao_jax.data.packing import BatchSpec, pack
from sao_jax.data.solutions import read_solutions, solution_episodes
from sao_jax.types import Version

CHAT = make_chat(ChatConfig())


def generic(question, solution="5", correct=True, **more):
  return {"question": question, "solution": solution, "correct": correct, **more}


def gsm8k(question, **models):
  row = {"question": question, "ground_truth": "x 4"}
  return row | {m: {"solution": s, "is_correct": c} for m, (s, c) in models.items()}


@pytest.fixture
def write(tmp_path):
  def to(*rows):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)

  return to


def many(questions=40, each=4):
  return [
    gsm8k(f"{n}+1", **{f"m{k}": (str(n + k), k == 1) for k in range(each)})
    for n in range(questions)
  ]


def load(path, max_solutions=0, seed=0, max_tokens=48, prompt="{question}", report=print):
  task = TaskConfig(prompt=prompt)
  return solution_episodes(path, CHAT, task, max_tokens, max_solutions, seed, report)


def ids(episodes):
  return [e.episode_id for e in episodes]


def question(episode):
  t = episode.trajectories[0]
  return CHAT.decode(t.tokens[~t.action_mask])


def test_both_formats_line_by_line(write):
  path = write(
    generic("1+1", "2", 1),
    generic("1+2", "2", False, id="q7"),
    "",
    gsm8k("2+2", a=("4", True), b=("5", False)),
  )
  assert [(s.id, s.question, s.solution, s.correct) for s in read_solutions(path)] == [
    ("a.jsonl:1", "1+1", "2", True),
    ("a.jsonl:2:q7", "1+2", "2", False),
    ("a.jsonl:4:a", "2+2", "4", True),
    ("a.jsonl:4:b", "2+2", "5", False),
  ]


def test_an_episode_ends_with_its_reward(write):
  path = write(generic("1+1", "it is 2"), generic("2+2", "it is 5", 0))
  training, held_out, fingerprint = load(path, prompt="what is {question}?")
  rewards = {}
  for episode in training + held_out:
    t = episode.trajectories[0]
    reply = CHAT.decode(t.tokens[t.action_mask])
    rewards[question(episode), reply] = episode.reward
    assert t.rewards.tolist() == [0.0] * (len(t.tokens) - 1) + [episode.reward]
    assert t.action_mask[-1]
    assert np.array_equal(t.policy_version, np.where(t.action_mask, 0, -1))
  assert rewards == {
    ("what is 1+1?=", "it is 2<eos>"): 1.0,
    ("what is 2+2?=", "it is 5<eos>"): 0.0,
  }
  assert fingerprint == hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
  batch, _ = pack(training, Version(0, 0), Config(), spec=BatchSpec(1, 1, (48,)))
  assert batch.returns.tolist() == [training[0].reward]


def test_a_question_is_on_one_side_with_all_its_solutions(write):
  rows = many()
  rows[7]["question"] = " 3+1\n"  # the same question in other white space
  training, held_out, _ = load(write(*rows))
  assert len(training) + len(held_out) == 160
  sides = [
    {question(e).replace("\n", "").strip(" =") for e in side} for side in (training, held_out)
  ]
  assert not sides[0] & sides[1]
  assert (len(sides[0]), len(sides[1])) == (35, 4)  # 39 // 8 held out


def test_smaller_corpora_are_parts_of_larger_ones_and_are_tested_on_the_same(write):
  path = write(*many())
  everything, held_out, _ = load(path)
  for size in (1, 30, 100, len(everything), 10**6):
    training, same, _ = load(path, size)
    assert ids(training) == ids(everything)[:size]
    assert ids(same) == ids(held_out)
  assert ids(everything) != sorted(ids(everything))
  assert ids(load(path, seed=1)[1]) != ids(held_out)
  assert len({e.task_serial for e in everything + held_out}) == 160


def test_too_long_ones_are_counted_and_left_out(write):
  said = []
  rows = [generic(f"{n}+1", "1" * (5 + 20 * (n % 2)), n % 2) for n in range(40)]
  path = write(*rows)
  training, held_out, _ = load(path, max_tokens=20, report=said.append)
  assert len(training) + len(held_out) == 20
  assert len(said) == 1
  assert "40 solutions, 50% correct" in said[0]
  assert f"{len(training)} to train on, {len(held_out)} held out, 20 left out" in said[0]
  assert ids(load(path, 5, max_tokens=20)[0]) == ids(training)[:5]
  with pytest.raises(ValueError, match=r"0 to train on, 0 held out, 40 left out .*env\.max_tokens"):
    load(path, max_tokens=6)


BAD = {
  "no json": ("{", "Expecting"),
  "a list": ([1], "found list"),
  "no question": ({"solution": "x", "correct": True}, "question = None"),
  "no solution": (generic("1+1", None), "solution = None: must be text"),
  "no label": ({"question": "1", "solution": "x"}, "correct = None: must be true or false"),
  "label": (generic("1+1", "2", 2), "correct = 2: must be true or false, 1 or 0"),
  "label text": (gsm8k("1+1", a=("2", "yes")), "is_correct = 'yes'"),
  "no model": ({"question": "1", "ground_truth": "x"}, r"found \['ground_truth', 'question'\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_refusals_name_file_line_and_reason(what, write):
  row, reason = BAD[what]
  path = write(generic("1+1"), "", row)
  with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: .*{reason}"):
    read_solutions(path)


def test_what_the_chat_cannot_say_is_named(write):
  with pytest.raises(ValueError, match=r"a\.jsonl:\d: character 'É'"):
    load(write(generic("1+1", "É"), generic("1+2", "É")))
  with pytest.raises(ValueError, match=r"a\.jsonl:\d: a reply goes on after '</python>'"):
    load(write(*(generic(f"1+{n}", "<python>1</python>2") for n in range(2))))


def test_other_refusals(write):
  with pytest.raises(ValueError, match=r"task\.prompt = 'x' has no \{question\}"):
    load(write(generic("1+1")), prompt="x")
  with pytest.raises(ValueError, match="one question"):
    load(write(generic("1+1"), generic(" 1+1")))
