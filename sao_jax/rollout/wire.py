"""What travels beside JetStream's own protocol: metadata keys, and frames of four int32 columns.

The stock messages are used as they are (token ids in, token ids out, ``session_cache`` names the
session), so generated stubs of any language work.  Everything else is request metadata:

- ``x-sao-sampling``: JSON with temperature, top_k, top_p, stop_ids, key (all optional; without a
  key the server draws one).
- ``x-sao-frames``: ``batch`` (one message when the sample is complete) or ``stream``.  Then
  ``token_ids`` holds [token, bits(logprob), bits(sampled logprob), version] per token, the bits
  being float32 read as int32.  Absent: plain token ids, streamed.
- ``x-sao-incarnation``: refuse to sample under another one.
- ``x-sao-close``: forget the session named by ``session_cache``; nothing is sampled.

``HealthCheck`` answers with the initial metadata ``x-sao-version`` = "incarnation.step".
"""

import json
import secrets

import numpy as np

from sao_jax.rollout.requests import COLUMNS, BadRequest
from sao_jax.types import Completion, Sampling, Version

SAMPLING = "x-sao-sampling"
FRAMES = "x-sao-frames"
INCARNATION = "x-sao-incarnation"
CLOSE = "x-sao-close"
VERSION = "x-sao-version"

_FIELDS = {"temperature": float, "top_k": int, "top_p": float, "stop_ids": tuple, "key": tuple}


def encode_sampling(sampling: Sampling) -> str:
  return json.dumps({name: getattr(sampling, name) for name in _FIELDS})


def decode_sampling(text: str, max_new_tokens: int) -> Sampling:
  """Raises BadRequest where the text is not what ``encode_sampling`` writes."""
  try:
    given = json.loads(text)
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
      raise ValueError(f"unknown fields {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    fields = {name: _FIELDS[name](value) for name, value in given.items()}
    key = fields.setdefault("key", (secrets.randbits(32), secrets.randbits(32)))
    if len(key) != 2 or not all(isinstance(word, int) and 0 <= word < 2**32 for word in key):
      raise ValueError(f"key = {list(key)}: two integers of 32 bits are needed")
    fields["stop_ids"] = tuple(int(token) for token in fields.get("stop_ids", ()))
    return Sampling(max_new_tokens=max_new_tokens, **fields)
  except (ValueError, TypeError, AttributeError) as error:
    raise BadRequest(f"{SAMPLING}: {error}") from error


def encode_completion(completion: Completion) -> list[int]:
  bits = [x.view(np.int32) for x in (completion.logprobs, completion.sampled_logprobs)]
  columns = [completion.tokens, *bits, completion.policy_version]
  return np.stack(columns, 1).reshape(-1).tolist()


def decode_completion(ids: list[int], sampling: Sampling, incarnation: int) -> Completion:
  columns = np.ascontiguousarray(np.asarray(ids, np.int32).reshape(-1, COLUMNS).T)
  tokens = columns[0]
  stopped = len(tokens) > 0 and int(tokens[-1]) in sampling.stop_ids
  return Completion(
    tokens=tokens,
    logprobs=columns[1].view(np.float32),
    sampled_logprobs=columns[2].view(np.float32),
    policy_version=columns[3],
    temperature=sampling.temperature or 1.0,
    stop="stop" if stopped else "length",
    incarnation=incarnation,
  )


def encode_version(version: Version) -> str:
  return f"{version.incarnation}.{version.step}"


def decode_version(text: str) -> Version:
  incarnation, step = text.split(".")
  return Version(int(incarnation), int(step))
