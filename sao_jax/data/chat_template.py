"""The Jinja template by which other programs speak to a model as its chat did."""

import json

from sao_jax.data.chat import Chat, ChatMLChat

_SYSTEM = """\
{%- if not messages or messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\n' + SYSTEM + '<|im_end|>\\n' -}}
{%- endif -%}
"""
_HEAD = "{%- for message in messages -%}\n"
_TOOL_AS_USER = """\
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user' if loop.first or loop.previtem['role'] != 'tool' else '' -}}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' else '' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
"""
_PLAIN = """\
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
"""
_TAIL = """\
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template(chat: Chat) -> str | None:
  """A template that renders what ``chat.encode_prompt`` encodes; None for all but ChatML.

  Other programs take it with an exported model.  Unlike the chat's own encoding it makes text, so
  there content that spells a control token becomes one.
  """
  if not isinstance(chat, ChatMLChat):
    return None
  family = chat._family  # which template's default system message and tool turns
  system = "" if family.system is None else _SYSTEM.replace("SYSTEM", json.dumps(family.system))
  return system + _HEAD + (_TOOL_AS_USER if family.tool_as_user else _PLAIN) + _TAIL
