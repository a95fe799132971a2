"""Conversations of a file for a supervised start, packed into full rows, addressable by step.

One JSON object a line, ``.gz`` or not::

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

Roles are system, user, assistant and tool.  The model learns to say the assistant's turns, but for
those with ``"trained": false``.  A call of a tool stands in the content, as the model would say it.
What follows the last assistant turn is left out.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool, Int32

from sao_jax.data.chat import Chat
from sao_jax.data.lines import read_lines
from sao_jax.data.packing import BatchSpec
from sao_jax.data.traces import Trace, encode_trace
from sao_jax.types import Episode, Message, Trajectory

_ROLES = ("system", "user", "assistant", "tool")
_ELSEWHERE = ("tool_calls", "function_call")  # parts of a turn that its content does not hold


class ConversationBatches:
  """``batches[step]`` for any step ≥ 0: the episodes of one packed batch.

  Each epoch walks all conversations once, in an order of its own.  Conversations go into the first
  row with room for them; the batch is closed when the next one finds none.  Deterministic in
  (file, spec, seed, step), so that a resumed run asks for the step it wants.

  Args:
    path: see the module.
    chat: encodes the messages as an episode would.
    spec: ``rows`` of at most ``lengths[-1]`` tokens, and room for ``segments`` conversations.
    seed: of the orders.
    report: called with one line when conversations are skipped, because no row could hold them.

  Attributes:
    fingerprint: sha256 of the file's bytes.
    skipped: number of conversations longer than the longest row.

  Raises:
    ValueError: a line that is no conversation, named by file and line; nothing to train on.
  """

  def __init__(
    self,
    path: str,
    chat: Chat,
    spec: BatchSpec,
    seed: int,
    report: Callable[[str], None] = print,
  ) -> None:
    longest = spec.lengths[-1]
    encode = functools.partial(_encode_fitting, chat=chat, longest=longest)
    rows, self.fingerprint = read_lines(path, encode)
    self._rows = [(line, found) for line, found in rows if not isinstance(found, int)]
    self._sizes = [len(tokens) for _, (tokens, _) in self._rows]
    self._spec = spec
    self.skipped = len(rows) - len(self._rows)
    if self.skipped:
      most = max(found for _, found in rows if isinstance(found, int))
      text = (
        f"{path}: {self.skipped} of {len(rows)} conversations are longer than the longest row of "
        f"{longest} tokens (up to {most}) and are left out; packing.lengths sets the rows"
      )
      if not self._rows:
        raise ValueError(text)
      report(text)
    self._order = grain.MapDataset.range(len(self._rows)).seed(seed).shuffle().repeat(None)
    self._epochs: list[list[list[int]]] = []

  def __len__(self) -> int:
    """Conversations of an epoch."""
    return len(self._rows)

  def steps_per_epoch(self, epoch: int) -> int:
    """Batches of an epoch: which conversations share a row depends on its order."""
    return len(self._plan(epoch))

  def total_steps(self, epochs: int) -> int:
    return sum(self.steps_per_epoch(epoch) for epoch in range(epochs))

  def __getitem__(self, step: int) -> list[Episode]:
    if step < 0:
      raise IndexError(f"step {step}: steps start at 0")
    epoch = 0
    while step >= (steps := self.steps_per_epoch(epoch)):
      step, epoch = step - steps, epoch + 1
    return [self._episode(i) for i in self._plan(epoch)[step]]

  def _episode(self, index: int) -> Episode:
    line, (tokens, mask) = self._rows[index]
    return supervised_episode(tokens, mask, index, name=f"line-{line}")

  def _plan(self, epoch: int) -> list[list[int]]:
    for e in range(len(self._epochs), epoch + 1):
      size = len(self._rows)
      order = [self._order[e * size + i] for i in range(size)]
      self._epochs.append(fill_batches(order, self._sizes, self._spec))
    return self._epochs[epoch]


def fill_batches(order: Sequence[int], sizes: Sequence[int], spec: BatchSpec) -> list[list[int]]:
  """Cuts an order into batches that ``packing.pack`` can place, each as full as first fit makes it.

  Args:
    order: indices into ``sizes``.
    sizes: tokens of each, at most ``spec.lengths[-1]``.
    spec: rows and segments of a batch.
  """
  pending = collections.deque(order)
  batches = []
  while pending:
    batch: list[int] = []
    free = np.full(spec.rows, spec.lengths[-1])
    while pending and len(batch) < spec.segments:
      room = free >= sizes[pending[0]]
      if not room.any():
        break
      free[np.argmax(room)] -= sizes[pending[0]]
      batch.append(pending.popleft())
    # pack places the longest first, which now and then needs more room than the order given here.
    while not spec.fits([sizes[i] for i in batch]):
      pending.appendleft(batch.pop())
    batches.append(batch)
  return batches


def supervised_episode(
  tokens: Int32[np.ndarray, "T"],
  mask: Bool[np.ndarray, "T"],
  index: int,
  *,
  name: str = "",
  reward: float = 0.0,
) -> Episode:
  """Text as if version 0 had sampled it: the tokens of ``mask`` are its actions.

  Args:
    tokens, mask: as ``traces.encode_trace`` gives them; the mask holds at least one action.
    index: unique in a batch; the episode's place and its group.
    name: of the episode and its task; default ``trace-<index>``.
    reward: of the last action.
  """
  n, name = len(tokens), name or f"trace-{index}"
  rewards = np.zeros(n, np.float32)
  rewards[np.flatnonzero(mask)[-1]] = reward
  trajectory = Trajectory(
    task_id=name,
    episode_id=name,
    segment=0,
    group=index,
    tokens=tokens,
    action_mask=mask,
    rollout_logprobs=np.zeros(n, np.float32),
    policy_version=np.where(mask, 0, -1).astype(np.int32),
    temperature=np.ones(n, np.float32),
    rewards=rewards,
    truncated=False,
  )
  return Episode(name, index, 0, 0, index, (trajectory,), "done", reward)


def encode_conversation(
  row: Any, chat: Chat
) -> tuple[Int32[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
  """Tokens and the mask of what is trained, of one line of the file; ValueError if it is none."""
  trace = _conversation(row)
  for message in trace.messages:
    if message["role"] == "assistant":
      encode_reply(chat, message["content"])
  return encode_trace(trace, chat)


def _encode_fitting(
  row: Any, chat: Chat, longest: int
) -> tuple[Int32[np.ndarray, "T"], Bool[np.ndarray, "T"]] | int:
  """``encode_conversation``, or the number of tokens where that is more than ``longest``.

  What cannot fit by far is not encoded, which took a minute for 20 MB: the number is the fewest.
  """
  trace = _conversation(row)
  fewest = chat.fewest_tokens(sum(len(message["content"]) for message in trace.messages))
  if fewest > longest:
    return fewest
  tokens, mask = encode_conversation(row, chat)
  return (tokens, mask) if len(tokens) <= longest else len(tokens)


def encode_reply(chat: Chat, content: str) -> list[int]:
  """``chat.encode_reply``, refused where the model would have stopped before its end."""
  tokens = chat.encode_reply(content)
  early = next((i for i, token in enumerate(tokens[:-1]) if token in chat.stop_ids), None)
  if early is None:
    return tokens
  raise ValueError(
    f"a reply goes on after {chat.decode(tokens[early : early + 1])!r}, where this chat format ends "
    f"replies: …{chat.decode(tokens[max(early - 8, 0) : early + 8])!r}…. Cut it there, or use "
    "chat.format = 'chatml' for text of several lines"
  )


def _conversation(row: Any) -> Trace:
  messages = row.get("messages") if isinstance(row, dict) else None
  if not isinstance(messages, list) or not messages:
    found = sorted(row) if isinstance(row, dict) else type(row).__name__
    raise ValueError(f'expected {{"messages": [{{"role": …, "content": …}}, …]}}, found {found}')
  read: list[Message] = []
  trained: list[bool] = []
  for number, message in enumerate(messages, 1):
    try:
      read.append(_message(message))
      trained.append(_trained(message))
    except ValueError as error:
      raise ValueError(f"message {number}: {error}") from None
    if read[-1]["role"] == "assistant" and (number == 1 or read[-2]["role"] == "assistant"):
      raise ValueError(
        f"message {number} of the assistant answers nothing: a message of another role must come "
        "before it"
      )
  if not any(trained):
    raise ValueError(f"none of {len(read)} messages is an assistant turn that is trained")
  return Trace(tuple(read), tuple(trained), "conversation")


def _message(message: Any) -> Message:
  if not isinstance(message, dict):
    raise ValueError(f"expected an object, found {type(message).__name__}")
  role, content = message.get("role"), message.get("content")
  if role not in _ROLES:
    raise ValueError(f"role {role!r}: choose one of {', '.join(_ROLES)}")
  for key in _ELSEWHERE:
    if message.get(key):
      raise ValueError(
        f"{key!r} is not read: write the call into the content, as the environment expects it"
      )
  if not isinstance(content, str):
    raise ValueError(f"content must be text, found {type(content).__name__}")
  return Message(role=role, content=content)


def _trained(message: Any) -> bool:
  said = message["role"] == "assistant"
  trained = message.get("trained", said)
  if not isinstance(trained, bool):
    raise ValueError(f'"trained" = {trained!r}: must be true or false')
  if trained and not said:
    raise ValueError(f'"trained" = true on role {message["role"]!r}: only assistants learn')
  return trained
