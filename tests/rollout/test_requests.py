"""A request that the engine cannot serve is refused before it reaches a thread of the driver."""

import dataclasses

import numpy as np
import pytest

from sao_jax.rollout.requests import BadRequest, check_request
from sao_jax.types import Sampling

GOOD = Sampling(4, stop_ids=(1, 2), key=(2**32 - 1, 0), top_k=5, top_p=0.9)


def test_a_good_request_passes():
  check_request(np.arange(4, dtype=np.int32), GOOD, max_len=16, vocab_size=8)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"max_new_tokens": 0}, "at least 1"),
    ({"top_k": 2**31}, "at most 2147483647"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"stop_ids": (2**40,)}, "stop ids"),
    ({"stop_ids": (-1,)}, "stop ids"),
    ({"stop_ids": tuple(range(8)) * 9}, "stop ids"),
    ({"key": (2**33, 1)}, "two words"),
    ({"key": (-1, 1)}, "two words"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": 1e-46}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
  ],
)
def test_what_would_overflow_in_the_engine_is_refused(changes, message):
  sampling = dataclasses.replace(GOOD, **changes)
  with pytest.raises(BadRequest, match=message):
    check_request(np.arange(4, dtype=np.int32), sampling, max_len=16, vocab_size=8)


@pytest.mark.parametrize("tokens", [[], range(16), [8], [-1]])
def test_prompts_beyond_the_slot_or_the_vocabulary_are_refused(tokens):
  with pytest.raises(BadRequest):
    check_request(np.array(list(tokens), np.int32), GOOD, max_len=16, vocab_size=8)
