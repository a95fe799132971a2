"""Task sources for grain: random access, deterministic, held-out problems apart by their text."""

import dataclasses
import hashlib
import itertools
import os
import random
from typing import Any, Literal, Protocol, runtime_checkable

import grain

from sao_jax.config import TaskConfig
from sao_jax.data import arithmetic
from sao_jax.data.arithmetic import Problem
from sao_jax.data.lines import read_lines
from sao_jax.latex import last_boxed
from sao_jax.lexicon import TOPICS
from sao_jax.types import Message, Task

Split = Literal["train", "eval"]

_EPOCH = 1_000_000  # problems that a generator calls one epoch
_TRIES = 1000


class TaskSource(Protocol):
  """A grain RandomAccessDataSource of tasks."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Task: ...


@runtime_checkable
class ChangingSource(TaskSource, Protocol):
  """A source whose tasks depend on when they are asked too."""

  def at(self, task: Task) -> Task:
    """The task as it is at its serial."""


def make_source(config: TaskConfig, split: Split = "train") -> TaskSource:
  """The tasks of a config.

  ``meta`` of a task: ``question``, ``answer`` (text) and, for generated ones, ``expression``; for
  writing ``question``, ``topic`` (its words), ``style`` (wanted) and ``phase``.  A task's id is the
  same wherever the same problem comes up.

  Raises:
    ValueError: a prompt without ``{question}``, a space too small for ``eval_size``, a bad file
      (named with its line).
  """
  if split not in ("train", "eval"):
    raise ValueError(f"split = {split!r}: choose train or eval")
  if "{question}" not in config.prompt:
    raise ValueError(f"task.prompt = {config.prompt!r} has no {{question}} in it")
  if config.source == "jsonl":
    return _Listed(config, _split_file(config)[split])
  if config.source == "writing":
    return _Topics(config, split)
  if config.kind in ("sum", "mix"):
    return _Pooled(config, split)
  if config.kind in ("expression", "word_problem"):
    return _Drawn(config, split)
  raise ValueError(f"task.kind = {config.kind!r}: choose one of expression, word_problem, mix, sum")


def fingerprint(config: TaskConfig) -> str:
  """sha256 of what the tasks are made from: a file's bytes, or a sample of what is generated."""
  digest = hashlib.sha256()
  if config.source == "jsonl":
    for path in filter(None, (config.path, config.eval_path)):
      with open(path, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
  else:
    for split in ("train", "eval"):
      source = make_source(config, split)
      for index in range(min(64, len(source))):
        digest.update(repr(source[index]).encode())
  return digest.hexdigest()


def _task(config: TaskConfig, id_: str, meta: dict[str, Any]) -> Task:
  # Not str.format: a prompt may hold braces of its own (\boxed{}).
  text = config.prompt.replace("{question}", meta["question"])
  return Task(id=id_, prompt=[Message(role="user", content=text)], meta=meta)


def _generated(config: TaskConfig, problem: Problem) -> Task:
  return _task(config, f"{config.kind}:{problem.question}", problem._asdict())


class _Drawn:
  """Problems drawn by index from a space too large to list; held-out ones are drawn again."""

  def __init__(self, config: TaskConfig, split: Split) -> None:
    self._config = config
    self._draw = arithmetic.expression if config.kind == "expression" else arithmetic.word_problem
    self._held_out: dict[str, Problem] = {}
    index = 0
    while len(self._held_out) < config.eval_size:
      problem = self._drawn("eval", index)
      self._held_out.setdefault(problem.question, problem)
      index += 1
      if index > 20 * config.eval_size + _TRIES:
        raise ValueError(self._too_small(len(self._held_out)))
    self._eval = list(self._held_out.values()) if split == "eval" else None

  def _drawn(self, name: str, index: int) -> Problem:
    rng = random.Random(f"{self._config.shuffle_seed}/{name}/{index}")
    return self._draw(rng, self._config.difficulty, self._config.digits)

  def _too_small(self, found: int) -> str:
    config = self._config
    return (
      f"task.eval_size = {config.eval_size} held-out problems leave none for training: "
      f"{config.kind} with difficulty {config.difficulty} and {config.digits} digits has about "
      f"{found} distinct ones; raise task.difficulty or task.digits, or lower task.eval_size"
    )

  def __len__(self) -> int:
    return _EPOCH if self._eval is None else len(self._eval)

  def __getitem__(self, index: int) -> Task:
    index = _checked(index, len(self))
    if self._eval is not None:
      return _generated(self._config, self._eval[index])
    for attempt in range(_TRIES):
      problem = self._drawn("train", index + attempt * _EPOCH)
      if problem.question not in self._held_out:
        return _generated(self._config, problem)
    raise ValueError(self._too_small(len(self._held_out)))


class _Pooled:
  """All problems of a small space; operations take turns, so that each is equally frequent.

  A smaller pool (products) comes round more often in an epoch than a larger one (sums).
  """

  def __init__(self, config: TaskConfig, split: Split) -> None:
    self._config = config
    pools = arithmetic.pools(config)
    shares = [(config.eval_size + i) // len(pools) for i in range(len(pools))]
    self._pools = []
    for i, (pool, share) in enumerate(zip(pools, shares)):
      if share >= len(pool):
        raise ValueError(
          f"task.eval_size = {config.eval_size} holds out {share} of {len(pool)} problems with "
          f"{pool[0].expression.strip('0123456789')!r}; none are left for training: lower "
          "task.eval_size"
        )
      random.Random(f"{config.shuffle_seed}/{i}").shuffle(pool)
      self._pools.append(pool[:share] if split == "eval" else pool[share:])
    if split == "eval":
      self._problems = [problem for pool in self._pools for problem in pool]
      self._pools = [self._problems]
    self._length = len(self._pools) * max(map(len, self._pools))

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, index: int) -> Task:
    turn, which = divmod(_checked(index, self._length), len(self._pools))
    pool = self._pools[which]
    return _generated(self._config, pool[turn % len(pool)])


class _Listed:
  def __init__(self, config: TaskConfig, rows: list[tuple[str, dict[str, Any]]]) -> None:
    self._config, self._rows = config, rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Task:
    id_, meta = self._rows[_checked(index, len(self))]
    return _task(self._config, id_, meta)


class _Topics:
  """Pairs of topics to write about.  The wanted style is not in the prompt; it changes with time.

  Phase p = min(serial // phase_length, last): of the first ``phase_length`` tasks of a stream all
  want the first style, and so on, whichever pairs the shuffle of an epoch gives them, and in
  whatever order their episodes end.  Held-out pairs want the last style.
  """

  def __init__(self, config: TaskConfig, split: Split) -> None:
    pairs = list(itertools.combinations(TOPICS, 2))
    if config.eval_size >= len(pairs):
      raise ValueError(
        f"task.eval_size = {config.eval_size} holds out all of the {len(pairs)} pairs of topics; none "
        "are left for training: lower task.eval_size"
      )
    random.Random(config.shuffle_seed).shuffle(pairs)
    self._config, self._last = config, len(config.styles) - 1
    self._held_out = split == "eval"
    self._pairs = pairs[: config.eval_size] if self._held_out else pairs[config.eval_size :]

  def __len__(self) -> int:
    return len(self._pairs)

  def __getitem__(self, index: int) -> Task:
    topic = self._pairs[_checked(index, len(self))]
    question = ", ".join(topic)
    task = _task(self._config, f"writing:{question}", {"question": question, "topic": topic})
    return self._wanting(task, self._last) if self._held_out else task

  def at(self, task: Task) -> Task:
    return self._wanting(task, min(task.serial // self._config.phase_length, self._last))

  def _wanting(self, task: Task, phase: int) -> Task:
    wanted = {"style": self._config.styles[phase], "phase": phase}
    return dataclasses.replace(task, meta=task.meta | wanted)


def _checked(index: int, length: int) -> int:
  index = int(index)
  if not 0 <= index < length:
    raise IndexError(f"task {index} of {length}")
  return index


def read_jsonl(path: str) -> list[tuple[str, dict[str, Any]]]:
  """(id, meta) of each line of a GSM8K or MATH file, ``.gz`` or not.

  GSM8K: ``question`` and ``answer`` ending in ``#### n``.  MATH: ``problem`` and ``answer``, or
  ``solution`` with a boxed answer.

  Raises:
    ValueError: a line that is neither, named by file and line.
  """
  rows, _ = read_lines(path, _parse)
  return [(f"{os.path.basename(path)}:{number}", meta) for number, meta in rows]


def _parse(row: Any) -> dict[str, Any]:
  if not isinstance(row, dict):
    raise ValueError(f"expected an object, found {type(row).__name__}")
  if "question" in row and "answer" in row:
    _, found, answer = str(row["answer"]).rpartition("####")
    if not found or not answer.strip():
      raise ValueError("GSM8K's answer has no '#### number' at its end")
    return {"question": str(row["question"]), "answer": answer.strip().replace(",", "")}
  if "problem" in row:
    boxed = row.get("answer")
    if boxed is None:
      boxed = last_boxed(str(row.get("solution", "")))
    if boxed is None or not str(boxed).strip():
      raise ValueError("MATH's problem has neither an answer nor a solution with \\boxed{…}")
    return {"question": str(row["problem"]), "answer": str(boxed).strip()}
  raise ValueError(
    f"expected question and answer (GSM8K) or problem and solution (MATH), found {sorted(row)}"
  )


def _split_file(config: TaskConfig) -> dict[Split, list[tuple[str, dict[str, Any]]]]:
  """Held-out rows and the rest, without any row whose question is held out."""
  if not config.path:
    raise ValueError("task.source = 'jsonl' needs task.path")
  rows = read_jsonl(config.path)
  candidates = read_jsonl(config.eval_path) if config.eval_path else list(rows)
  random.Random(config.shuffle_seed).shuffle(candidates)
  held_out: list[tuple[str, dict[str, Any]]] = []
  texts: set[str] = set()
  for id_, meta in candidates:
    if len(held_out) == config.eval_size:
      break
    if _text(meta) not in texts:
      held_out.append((id_, meta))
      texts.add(_text(meta))
  # A separate file is held out as a whole, however few of it are asked.
  texts |= {_text(meta) for _, meta in candidates} if config.eval_path else set()
  train = [row for row in rows if _text(row[1]) not in texts]
  if not train:
    raise ValueError(
      f"{config.path} has {len(rows)} problems and task.eval_size = {config.eval_size} of them are "
      "held out: none are left for training"
    )
  return {"train": train, "eval": held_out}


def _text(meta: dict[str, Any]) -> str:
  return " ".join(meta["question"].split())


class TaskStream:
  """``stream[serial]``: the tasks of a source for ever, shuffled anew each epoch.

  Random access without state: a resumed run asks for the serials it wants.
  """

  def __init__(self, source: TaskSource, seed: int) -> None:
    self.epoch_length, self._source = len(source), source
    self._tasks = grain.MapDataset.source(source).seed(seed).shuffle().repeat(None)

  def __getitem__(self, serial: int) -> Task:
    if serial < 0:
      raise IndexError(f"task serial {serial}: serials start at 0")
    task = dataclasses.replace(self._tasks[serial], serial=serial)
    return self._source.at(task) if isinstance(self._source, ChangingSource) else task


def task_stream(source: TaskSource, seed: int) -> TaskStream:
  """The infinite, shuffled, random-access stream of a source; deterministic in (seed, serial)."""
  return TaskStream(source, seed)
