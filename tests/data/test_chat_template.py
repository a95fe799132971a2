"""The exported template renders what the chat encodes."""

import pytest

from sao_jax.config import ChatConfig
from sao_jax.data.chat import make_chat
from sao_jax.data.chat_template import chat_template
from tests.data.test_chat import assistant, byte_tokenizer, tool, user

jinja2 = pytest.importorskip("jinja2")

HISTORIES = (
  [],
  [user("how many")],
  [{"role": "system", "content": "be brief"}, user(" 12 + 7\n")],
  [user("a"), assistant("b"), tool("1"), tool("2"), assistant("c"), tool("3")],
)


@pytest.mark.parametrize(
  "added", [(), ("<tool_call>",), ("<tool_call>", "<think>"), ("<jupyter_start>",)]
)
def test_template_renders_what_the_chat_encodes(added):
  tokenizer = byte_tokenizer(*added)
  chat = make_chat(ChatConfig(format="chatml"), tokenizer)
  # as transformers sets Jinja up
  environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
  template = environment.from_string(chat_template(chat))
  for messages in HISTORIES:
    text = template.render(messages=messages, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False).ids == chat.encode_prompt(messages)
    assert text == template.render(messages=messages) + "<|im_start|>assistant\n"


def test_other_formats_have_none():
  assert chat_template(make_chat(ChatConfig())) is None
  assert chat_template(make_chat(ChatConfig(format="plain"), byte_tokenizer())) is None
