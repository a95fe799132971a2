import errno
import os

import pytest

from sao_jax.outcome import one_line, out_of_room

LONG = "/a/folder" * 60


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["os", "tensorstore"])
def test_a_full_disk_is_said_before_the_paths(number, kind):
  text = f"RESOURCE_EXHAUSTED: Error writing {LONG} [os_error_code='{number}']"
  error = OSError(number, os.strerror(number), LONG) if kind == "os" else ValueError(text)
  assert out_of_room(error)
  assert one_line(error).count(os.strerror(number)) == 1
  assert len(one_line(error)) < 400


def test_other_errors_keep_their_words():
  for error in (OSError(errno.EACCES, "no", LONG), ValueError("os_error_code='5' no")):
    assert not out_of_room(error)
    assert "space" not in one_line(error)
  outer = RuntimeError("saving failed")
  outer.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  assert one_line(outer) == "OSError: [Errno 28] No space left on device"
