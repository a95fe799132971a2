"""A long run holds what a short one holds: memory, threads and descriptors do not grow."""

import dataclasses
import os
import pathlib
import time

import numpy as np
import pytest

from tests.train.test_resume import log_of, rows, start


@dataclasses.dataclass(frozen=True)
class Sample:
  step: int
  rss_mb: float
  threads: int
  descriptors: int


def sample(pid: int, step: int) -> Sample:
  proc = pathlib.Path("/proc") / str(pid)
  fields = dict(
    line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
  )
  rss_mb = int(fields["VmRSS"].split()[0]) / 1024
  return Sample(step, rss_mb, int(fields["Threads"]), len(os.listdir(proc / "fd")))


def last_step(path: pathlib.Path) -> int:
  found = rows(path)
  return found[-1]["step"] if found else 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_long_asynchronous_run_does_not_grow(tmp_path):
  """``SOAK=2000`` for the real thing: about MB per 1,000 steps."""
  steps = int(os.environ.get("SOAK", "120"))
  folder = tmp_path / "run"
  changes = (f"--config.num_steps={steps}", "--config.rollout.max_staleness=2")
  changes += ("--config.rollout.prefix_cache_mb=1",)  # filled soon: what it holds is bounded
  # Not too many saves: tensorstore's bindings keep some 25 to 85 KB of each for ever.
  changes += (f"--config.checkpoint.every={max(10, steps // 40)}", "--config.sft.steps=20")
  process = start(folder, *changes, f"--config.evaluate.every={max(10, steps // 40)}")
  samples: list[Sample] = []
  while process.poll() is None:
    step = last_step(folder / "metrics.jsonl")
    if step and (not samples or step > samples[-1].step):
      samples.append(sample(process.pid, step))
    time.sleep(1.0 if steps > 500 else 0.2)
  assert process.returncode == 0, log_of(folder)
  settled = [s for s in samples if s.step > steps / 3]  # caches are full, everything is compiled
  assert len(settled) > 10
  slope = np.polyfit([s.step for s in settled], [s.rss_mb for s in settled], 1)[0]
  print(
    f"RSS {settled[0].rss_mb:.0f} → {settled[-1].rss_mb:.0f} MB, {1e3 * slope:.2f} MB/1,000 steps"
  )
  for name in ("threads", "descriptors"):
    first, *_, last = np.array_split([getattr(s, name) for s in settled], 4)
    print(f"{name} {min(first)}–{max(first)} → {min(last)}–{max(last)}")
    # A save under way has some of its own, so a sample is high now and then: the largest says when it
    # was taken. What is kept, one for each save or evaluation, lifts the lowest and the median. Pools
    # start their few threads when they first need them.
    assert min(last) <= min(first) + 4
    assert np.median(last) <= np.median(first) + 8
  assert slope * steps < 0.05 * settled[0].rss_mb + 5
