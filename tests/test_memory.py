import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from sao_jax import memory

def pages():
  return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def use(mib):
  np.ones(mib << 18, np.float32)  # freed at once

memory.keep_freed()
before = pages()
use(300)
kept = pages() - before
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(300)
again = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
memory.give_back_freed()
returned = pages() - before
use(300)
print(kept, again, returned, pages() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_is_kept_until_it_is_given_back():
  done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
  kept, faults, returned, after = map(int, done.stdout.split())
  assert kept > 250
  assert faults < 1000  # of 76,800 pages
  assert returned < 50
  assert after < 50
