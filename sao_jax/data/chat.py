"""Messages ↔ tokens.  The only file that knows a chat template.

Token-in, token-out: a sampled reply keeps its ids for ever; only new messages are encoded, and they
are appended.  The pieces are chosen such that the concatenation equals what the model's template
gives for the untouched history.  Content of users and tools can never form a control token, nor any
other that was added to the vocabulary: a tool that prints ``<|im_end|>`` prints ten characters, and
one that prints ``</tool_response>`` sixteen.  What the system and the assistant say may hold those
of the added tokens that are not special, such as ``<think>``, as the model samples them.
"""

import abc
import dataclasses
import functools
import string
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers

from sao_jax.config import ChatConfig
from sao_jax.types import Message

PAD, EOS, REPLACEMENT = "<pad>", "<eos>", "\N{REPLACEMENT CHARACTER}"
TAGS = ("<python>", "</python>", "<answer>", "</answer>", "<output>", "</output>")
CHARACTERS = string.digits + "+-*/%()=" + " \n.,'?$:<>_" + string.ascii_lowercase


class Chat(abc.ABC):
  """Messages ↔ tokens of one model.

  Attributes:
    vocab_size: number of ids that this tokenizer can produce (a model's table may be larger).
    pad_id, eos_id: may be equal; a mask tells them apart, never the id.
    stop_ids: a sampled reply ends with the first of these, which is part of the reply.
  """

  tokenizer: Tokenizer
  vocab_size: int
  pad_id: int
  eos_id: int
  stop_ids: tuple[int, ...]

  @abc.abstractmethod
  def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
    """The whole prompt, ending with what starts a reply."""

  @abc.abstractmethod
  def encode_observation(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
    """What is appended after a sampled reply, ending with what starts the next one.

    ``closed`` is False when the reply was cut by its length, so that its end is appended too.
    """

  @abc.abstractmethod
  def encode_reply(self, content: str) -> list[int]:
    """A reply as the model should have sampled it, stop token included (for supervised starts)."""

  @abc.abstractmethod
  def decode_reply(self, tokens: Sequence[int]) -> Message:
    """A sampled reply as a message; its stop token is dropped where it is not content."""

  def fewest_tokens(self, characters: int) -> int:
    """A bound that is known without encoding: no text of that length has fewer tokens."""
    return characters // self._most_characters

  @functools.cached_property
  def _most_characters(self) -> int:
    # Four times the longest token, for a tokenizer may normalize its text.
    return 4 * max(map(len, self.tokenizer.get_vocab()))

  def decode(self, tokens: Iterable[int]) -> str:
    """Everything, control tokens included."""
    return self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)


def make_chat(config: ChatConfig, tokenizer: Tokenizer | None = None) -> Chat:
  """The chat of a config.

  Args:
    config: ``format`` is char | chatml | plain.
    tokenizer: the one that comes with the weights; ``config.tokenizer`` (a tokenizer.json) wins.

  Raises:
    ValueError: unknown format, no tokenizer, or one without the format's control tokens.
  """
  if config.format == "char":
    return CharChat()
  if config.tokenizer:
    tokenizer = Tokenizer.from_file(config.tokenizer)
  if tokenizer is None:
    raise ValueError(
      f"chat.format = {config.format!r} needs a tokenizer: set chat.tokenizer to a tokenizer.json, "
      "or load weights that bring one"
    )
  match config.format:
    case "chatml":
      return ChatMLChat(tokenizer)
    case "plain":
      return PlainChat(tokenizer)
  raise ValueError(f"chat.format = {config.format!r}: choose one of char, chatml, plain")


def char_tokenizer() -> Tokenizer:
  """One token per character and one per tag: 64 ids, the same for every task."""
  specials = (PAD, EOS, *TAGS, REPLACEMENT)
  vocab = {token: i for i, token in enumerate((*specials, *CHARACTERS))}
  tokenizer = Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=REPLACEMENT))
  tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(
    [AddedToken(t, special=True, normalized=False) for t in (PAD, EOS, *TAGS)]
  )
  return tokenizer


class CharChat(Chat):
  """``12+3*4=<python>12+3*4</python><output>24</output><answer>24</answer><eos>``.

  A user message is its text and ``=``; a reply ends at ``</python>`` (a tool call) or ``<eos>``;
  a tool message stands between ``<output>`` tags.  Tool output may hold any character: capitals
  become lower case and what is still unknown becomes U+FFFD, so that no output can stop a run.
  """

  def __init__(self) -> None:
    self.tokenizer = char_tokenizer()
    vocab = self.tokenizer.get_vocab()
    self._ids = {c: vocab[c] for c in CHARACTERS}
    self._tags = {t: vocab[t] for t in (PAD, EOS, *TAGS)}
    self._unknown = vocab[REPLACEMENT]
    self.vocab_size = self.tokenizer.get_vocab_size()
    self.pad_id, self.eos_id = self._tags[PAD], self._tags[EOS]
    self.stop_ids = (self.eos_id, self._tags["</python>"])

  def _known(self, text: str) -> str:
    for c in text:
      if c not in self._ids:
        raise ValueError(
          f"character {c!r} in {text[:60]!r} is not in the character vocabulary "
          f"{CHARACTERS!r}; use chat.format = 'chatml' or 'plain' for this task"
        )
    return text

  def _encode(self, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = []
    for message in messages:
      role, content = message["role"], message["content"]
      if role == "user":
        ids += [self._ids[c] for c in self._known(content)] + [self._ids["="]]
      elif role == "system":
        ids += [self._ids[c] for c in self._known(content)] + [self._ids["\n"]]
      elif role == "tool":
        body = [self._ids.get(c, self._ids.get(c.lower(), self._unknown)) for c in content]
        ids += [self._tags["<output>"], *body, self._tags["</output>"]]
      elif role == "assistant":
        ids += self.encode_reply(content)
      else:
        raise _unknown_role(role)
    return ids

  def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
    return self._encode(messages)

  def encode_observation(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
    return ([] if closed else [self.eos_id]) + self._encode(messages)

  def encode_reply(self, content: str) -> list[int]:
    ids = self.tokenizer.encode(self._known(content)).ids
    return ids if ids and ids[-1] in self.stop_ids else [*ids, self.eos_id]

  def decode_reply(self, tokens: Sequence[int]) -> Message:
    tokens = [int(t) for t in tokens]
    if tokens and tokens[-1] == self.eos_id:
      tokens = tokens[:-1]
    return Message(role="assistant", content=self.decode(tokens))


@dataclasses.dataclass(frozen=True)
class _Family:
  """How the templates that share ChatML differ."""

  system: str | None  # what the template says when the history starts without a system message
  tool_as_user: bool  # tool output inside <tool_response> tags of a user message


def _family(tokenizer: Tokenizer) -> _Family:
  def has(token: str) -> bool:
    return tokenizer.token_to_id(token) is not None

  if has("<think>"):  # Qwen3
    return _Family(None, True)
  if has("<tool_call>"):  # Qwen2.5
    return _Family("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", True)
  if has("<jupyter_start>"):  # SmolLM2
    return _Family(
      "You are a helpful AI assistant named SmolLM, trained by Hugging Face", tool_as_user=False
    )
  return _Family(None, False)


class _PlainText:
  """Text → tokens, none of which is an added one, however the text is spelled.

  Added tokens of white space are no control tokens: some tokenizers keep runs of spaces so.
  """

  def __init__(self, tokenizer: Tokenizer) -> None:
    self._tokenizer = _own(tokenizer)
    added = self._tokenizer.get_added_tokens_decoder()
    controls = {id_: token.content for id_, token in added.items() if token.content.strip()}
    self._controls = frozenset(controls)
    # Of the added tokens this switches off the special ones only: let all be special.
    self._tokenizer.add_special_tokens([AddedToken(c, special=True) for c in controls.values()])
    self._tokenizer.encode_special_tokens = True

  def __call__(self, text: str) -> list[int]:
    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
    if self._controls.isdisjoint(ids):
      return ids
    # The model's own vocabulary holds the token as a word: spell it.
    spelled = [self._tokenizer.encode(c, add_special_tokens=False).ids for c in text]
    return [id_ for ids in spelled for id_ in ids if id_ not in self._controls]


_RESPONSE = ("<tool_response>", "</tool_response>")


class ChatMLChat(Chat):
  """``<|im_start|>role\\n…<|im_end|>\\n``: SmolLM2-Instruct, Qwen2.5 and Qwen3.

  The family is read off the tokenizer's control tokens, because the templates differ in the default
  system message and in how they show tool output.  A sampled reply ends with ``<|im_end|>``; the
  newline that the template puts behind it comes with the observation.
  """

  def __init__(self, tokenizer: Tokenizer) -> None:
    self.tokenizer = _own(tokenizer)
    # Content is encoded with control tokens switched off, so that it cannot forge a turn.
    self.tokenizer.encode_special_tokens = True
    self._plain = _PlainText(tokenizer)
    self._start = _control(tokenizer, "<|im_start|>")
    self._end = _control(tokenizer, "<|im_end|>")
    self._newline = self._text("\n")
    self._family = _family(tokenizer)
    added = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
    self._tags = {tag: added[tag] for tag in _RESPONSE if tag in added}
    text_end = tokenizer.token_to_id("<|endoftext|>")
    self.vocab_size = tokenizer.get_vocab_size()
    self.eos_id = self._end
    self.pad_id = self._end if text_end is None else text_end
    self.stop_ids = (self._end,) if text_end is None else (self._end, text_end)

  def _text(self, text: str) -> list[int]:
    return self.tokenizer.encode(text, add_special_tokens=False).ids

  def _turns(self, messages: Sequence[Message]) -> Iterator[list[int]]:
    """The tokens between the start and the end of each turn."""
    responses: list[str] = []
    for message in [*messages, None]:
      if message is not None and message["role"] == "tool" and self._family.tool_as_user:
        responses.append(message["content"])
        continue
      if responses:
        yield self._responses(responses)
        responses = []
      if message is not None:
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant", "tool"):
          raise _unknown_role(role)
        encode = self._plain if role in ("user", "tool") else self._text
        yield encode(f"{role}\n{content}")

  def _responses(self, contents: Sequence[str]) -> list[int]:
    """Output of tools as a turn of the user; only the tags around it may be tokens of their own."""
    ids: list[int] = []
    text = "user"
    for content in contents:
      for part in ("\n", _RESPONSE[0], f"\n{content}\n", _RESPONSE[1]):
        if part in self._tags:
          ids += [*self._plain(text), self._tags[part]]
          text = ""
        else:
          text += part
    return [*ids, *self._plain(text)]

  def _encode(self, messages: Sequence[Message]) -> list[int]:
    ids: list[int] = []
    for turn in self._turns(messages):
      ids += [self._start, *turn, self._end, *self._newline]
    return [*ids, self._start, *self._text("assistant\n")]

  def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
    system = self._family.system
    if system is not None and (not messages or messages[0]["role"] != "system"):
      messages = [Message(role="system", content=system), *messages]
    return self._encode(messages)

  def encode_observation(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
    return ([] if closed else [self._end]) + self._newline + self._encode(messages)

  def encode_reply(self, content: str) -> list[int]:
    return [*self._text(content), self._end]

  def decode_reply(self, tokens: Sequence[int]) -> Message:
    tokens = [int(t) for t in tokens]
    if tokens and tokens[-1] in self.stop_ids:
      tokens = tokens[:-1]
    return Message(role="assistant", content=self.decode(tokens))


class PlainChat(Chat):
  """Contents one after the other, for base models and few-shot prompts; a reply is one line.

  The reply keeps its newline, which is how strict grading tells a finished line from a cut one.
  """

  def __init__(self, tokenizer: Tokenizer) -> None:
    self.tokenizer = _own(tokenizer)
    self.tokenizer.encode_special_tokens = True
    self._plain = _PlainText(tokenizer)
    self.vocab_size = tokenizer.get_vocab_size()
    newline = self.tokenizer.encode("\n", add_special_tokens=False).ids
    if len(newline) != 1:
      raise ValueError(
        f"chat.format = 'plain' ends a reply at one newline token, but this tokenizer makes "
        f"{len(newline)} of it"
      )
    text_end = tokenizer.token_to_id("<|endoftext|>")
    self.eos_id = newline[0]
    self.pad_id = self.eos_id if text_end is None else text_end
    self.stop_ids = (self.eos_id,) if text_end is None else (self.eos_id, text_end)

  def _encode(self, messages: Sequence[Message]) -> list[int]:
    return self._plain("".join(message["content"] for message in messages))

  def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
    return self._encode(messages)

  def encode_observation(self, messages: Sequence[Message], *, closed: bool = True) -> list[int]:
    return ([] if closed else [self.eos_id]) + self._encode(messages)

  def encode_reply(self, content: str) -> list[int]:
    text = content.removesuffix("\n")
    return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.eos_id]

  def decode_reply(self, tokens: Sequence[int]) -> Message:
    tokens = [int(t) for t in tokens]
    if tokens and tokens[-1] in self.stop_ids and tokens[-1] != self.eos_id:
      tokens = tokens[:-1]
    return Message(role="assistant", content=self.decode(tokens))


def _own(tokenizer: Tokenizer) -> Tokenizer:
  """A copy to change, without the truncation and padding that a file's last user asked for."""
  copy = Tokenizer.from_str(tokenizer.to_str())
  copy.no_truncation()
  copy.no_padding()
  return copy


def _control(tokenizer: Tokenizer, token: str) -> int:
  id_ = tokenizer.token_to_id(token)
  if id_ is None:
    raise ValueError(
      f"chat.format = 'chatml' needs the token {token!r}, which this tokenizer lacks; use 'plain'"
    )
  return id_


def _unknown_role(role: str) -> ValueError:
  return ValueError(f"message role {role!r}: choose one of system, user, assistant, tool")
