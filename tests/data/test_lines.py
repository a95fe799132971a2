"""Files of JSON lines: whatever is wrong with one is a ValueError that names it."""

import gzip
import hashlib
import time

import pytest

from sao_jax.config import ChatConfig, TaskConfig
from sao_jax.data.chat import make_chat
from sao_jax.data.conversations import ConversationBatches
from sao_jax.data.lines import read_lines
from sao_jax.data.packing import BatchSpec
from sao_jax.data.solutions import read_solutions
from sao_jax.data.tasks import make_source


def of_conversations(path):
  ConversationBatches(path, make_chat(ChatConfig()), BatchSpec(2, 8, (16,)), 0, print)


def of_tasks(path):
  make_source(TaskConfig(source="jsonl", path=path, eval_size=0))


READERS = (of_conversations, of_tasks, read_solutions)
WHOLE = gzip.compress(b'{"question": "1"}\n' * 99)
BAD = {
  "cut.gz": (WHOLE[:-9], r"cut\.gz is no whole gzip file"),
  "stream.gz": (WHOLE[:10] + b"\xff" * 20 + WHOLE[30:], r"stream\.gz is no whole gzip file"),
  "no.gz": (b'{"question": "1"}', r"no\.gz is no whole gzip file"),
  "deep": (b"\n" + b"[" * 200_000, "deep, line 2: brackets inside brackets"),
  "latin": ('\n{"question": "café"}'.encode("latin-1"), r"latin, line 2: byte 18 \(0xe9\)"),
  "empty": (b"\n\n", "empty is empty"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", BAD)
def test_every_reader_names_file_and_line(read, name, tmp_path):
  data, reason = BAD[name]
  (tmp_path / name).write_bytes(data)
  with pytest.raises(ValueError, match=reason):
    read(str(tmp_path / name))


def test_what_is_read(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\n[1]')
  assert read_lines(str(path), lambda row: row) == (
    [(1, {"a": "\u2028"}), (3, [1])],
    hashlib.sha256(path.read_bytes()).hexdigest(),
  )


def test_messages_stay_short(tmp_path):
  (tmp_path / "a").write_text('{"messages": [{"role": "%s"}]}' % ("x" * 10**6))
  with pytest.raises(ValueError, match="role 'xxx") as caught:
    of_conversations(str(tmp_path / "a"))
  assert len(str(caught.value)) < 1000


def test_a_huge_conversation_is_refused_at_once(tmp_path):
  row = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "1"}]}'
  (tmp_path / "a").write_text(row % ("1" * 20_000_000))
  start = time.monotonic()
  with pytest.raises(ValueError, match="1 of 1 conversations are longer than the longest row"):
    of_conversations(str(tmp_path / "a"))
  assert time.monotonic() - start < 10  # 77 s when it was encoded
