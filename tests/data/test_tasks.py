"""Task sources: deterministic, held-out problems apart by text, streams that resume anywhere."""

import ast
import gzip
import json
import operator
import random

import pytest

from sao_jax.config import TaskConfig
from sao_jax.data.arithmetic import sum_of_products, word_problem
from sao_jax.data.chat import CHARACTERS
from sao_jax.data.tasks import make_source, task_stream

KINDS = ("expression", "word_problem", "mix", "sum")


def evaluate(text):
  ops = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

  def walk(node):
    if isinstance(node, ast.Constant):
      return node.value
    return ops[type(node.op)](walk(node.left), walk(node.right))

  return walk(ast.parse(text, mode="eval").body)


def questions(source, n=None):
  return [source[i].meta["question"] for i in range(n or len(source))]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_problems_never_occur_in_training(kind):
  config = TaskConfig(kind=kind, eval_size=60)
  held_out = questions(make_source(config, "eval"))
  assert len(held_out) == len(set(held_out)) == 60
  train = make_source(config)
  seen = questions(train, min(len(train), 8000))
  assert not set(held_out) & set(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_and_right(kind):
  config = TaskConfig(kind=kind, eval_size=20)
  one, other = make_source(config), make_source(config)
  for i in random.Random(0).sample(range(len(one)), 50):
    assert one[i] == other[i]
    assert str(evaluate(one[i].meta["expression"])) == one[i].meta["answer"]
  changed = make_source(TaskConfig(kind=kind, eval_size=20, shuffle_seed=1))
  assert questions(changed, 20) != questions(one, 20)


def test_an_answer_by_hand():
  assert sum_of_products("12+3*4") == 24
  assert sum_of_products("7*2-3*5*2+1") == -15
  problem = word_problem(random.Random(5), 2, 1)
  assert problem.question == (
    "zoe has 7 stamps. zoe wins 9 more. then zoe doubles them. how many stamps now?"
  )
  assert (problem.expression, problem.answer) == ("(7+9)*2", "32")


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_word_problems_stay_in_the_character_vocabulary(steps):
  for seed in range(50):
    problem = word_problem(random.Random(seed), steps, 2)
    assert set(problem.question) <= set(CHARACTERS)
    assert problem.question.count(".") == steps + 1
    assert int(problem.answer) > 0
    assert evaluate(problem.expression) == int(problem.answer)


def test_sums_are_listed_once_an_epoch():
  train, held_out = (
    make_source(TaskConfig(kind="sum", eval_size=100), s) for s in ("train", "eval")
  )
  assert (len(train), len(held_out)) == (8000, 100)
  assert len({*questions(train), *questions(held_out)}) == 8100


def test_mix_takes_operations_in_turn():
  source = make_source(TaskConfig(kind="mix", eval_size=30))
  signs = [q.split()[1] for q in questions(source)]
  assert signs.count("+") == signs.count("-") == signs.count("*")


def test_expressions_follow_the_config():
  source = make_source(TaskConfig(difficulty=4, digits=3, eval_size=4))
  for question in questions(source, 50):
    numbers = question.replace("-", "+").replace("*", "+").split("+")
    assert len(numbers) == 4
    assert all(1 <= int(n) <= 999 for n in numbers)


def test_too_small_a_space_is_refused():
  with pytest.raises(ValueError, match=r"eval_size = 200 .* leave none for training"):
    make_source(TaskConfig(difficulty=1, digits=1, eval_size=200))
  with pytest.raises(ValueError, match="holds out 3000 of 900"):
    make_source(TaskConfig(kind="mix", eval_size=9000))
  config = TaskConfig(difficulty=1, digits=1, eval_size=9)
  with pytest.raises(ValueError, match="leave none for training"):
    make_source(config)[0]


def test_prompt_may_hold_braces():
  prompt = r"Answer in \boxed{}. 1 + 1 = 2; {question} ="
  task = make_source(TaskConfig(kind="sum", prompt=prompt))[0]
  assert task.prompt == [
    {"role": "user", "content": prompt.replace("{question}", task.meta["question"])}
  ]
  with pytest.raises(ValueError, match=r"has no \{question\}"):
    make_source(TaskConfig(prompt="solve"))


def test_stream_is_random_access_and_reshuffles_each_epoch():
  source = make_source(TaskConfig(kind="sum", digits=1, eval_size=21))
  assert len(source) == 60
  stream, again = task_stream(source, 3), task_stream(source, 3)
  first = [stream[i].id for i in range(60)]
  second = [again[i].id for i in range(119, 59, -1)][::-1]
  assert sorted(first) == sorted(second) == sorted(source[i].id for i in range(60))
  assert first != second
  assert [stream[i].id for i in range(60, 120)] == second
  assert [stream[i].serial for i in (0, 5, 119)] == [0, 5, 119]
  assert [task_stream(source, 4)[i].id for i in range(60)] != first
  with pytest.raises(IndexError, match="serials start at 0"):
    stream[-1]


GSM8K = {"question": "Two pens cost $4. How much is one?", "answer": "4/2=<<4/2=2>>2\n#### 2"}
MATH = {"problem": "What is $1+1$?", "solution": r"It is $\boxed{\frac{4}{2}}$."}


def write(path, rows):
  opener = gzip.open if path.suffix == ".gz" else open
  with opener(path, "wt") as file:
    file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
  return str(path)


def test_files_of_both_formats(tmp_path):
  rows = [GSM8K, "", {**GSM8K, "question": "b", "answer": "#### 1,200"}]
  path = write(tmp_path / "gsm.jsonl.gz", rows)
  source = make_source(TaskConfig(source="jsonl", path=path, eval_size=0))
  assert [source[i].meta["answer"] for i in range(2)] == ["2", "1200"]
  assert source[1].id == "gsm.jsonl.gz:3"
  path = write(tmp_path / "math.jsonl", [MATH, {"problem": "x", "answer": "7"}])
  source = make_source(TaskConfig(source="jsonl", path=path, eval_size=0))
  assert [source[i].meta["answer"] for i in range(2)] == [r"\frac{4}{2}", "7"]


@pytest.mark.parametrize(
  ("row", "reason"),
  [
    ("{", "line 2: Expecting"),
    ({"question": "a", "answer": "2"}, "line 2: GSM8K's answer has no '#### number'"),
    ({"problem": "a", "solution": "2"}, "line 2: MATH's problem has neither"),
    ({"text": "a"}, r"line 2: expected question and answer .* found \['text'\]"),
    ([1], "line 2: expected an object, found list"),
  ],
)
def test_errors_name_the_line(tmp_path, row, reason):
  path = write(tmp_path / "bad.jsonl", [GSM8K, row if isinstance(row, str) else json.dumps(row)])
  with pytest.raises(ValueError, match=reason):
    make_source(TaskConfig(source="jsonl", path=path, eval_size=0))


def test_a_file_is_split_by_text(tmp_path):
  rows = [{**GSM8K, "question": f"q  {i % 8}"} for i in range(12)]
  path = write(tmp_path / "a.jsonl", rows)
  config = TaskConfig(source="jsonl", path=path, eval_size=3)
  train, held_out = make_source(config), make_source(config, "eval")
  assert len(set(questions(held_out))) == 3
  assert not set(questions(train)) & set(questions(held_out))
  assert len(set(questions(train))) == 5
  # A separate held-out file: what is in it leaves the training file.
  other = write(tmp_path / "b.jsonl", [{**GSM8K, "question": "q 1"}, {**GSM8K, "question": "new"}])
  config = TaskConfig(source="jsonl", path=path, eval_path=other, eval_size=1)
  assert "q  1" not in questions(make_source(config))
  assert len(make_source(config, "eval")) == 1
  with pytest.raises(ValueError, match="none are left for training"):
    make_source(TaskConfig(source="jsonl", path=path, eval_size=99))
