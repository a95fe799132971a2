"""The queue: admission, order, staleness at the pop, and accounts that always add up."""

import threading
import time

import numpy as np
import pytest

from sao_jax.rollout.queue import QueueStalled, TrajectoryQueue, WorkersDied
from sao_jax.types import Episode, Trajectory, Version


def episode(
  serial: int, sample: int = 0, *, versions: tuple[int, ...] = (0,), incarnation: int = 0
):
  count = len(versions)
  mask = np.array([False] + [True] * count)
  row = Trajectory(
    task_id=f"t{serial}",
    episode_id=f"{serial}.{sample}",
    segment=0,
    group=serial,
    tokens=np.zeros(1 + count, np.int32),
    action_mask=mask,
    rollout_logprobs=np.zeros(1 + count, np.float32),
    policy_version=np.array([-1, *versions], np.int32),
    temperature=np.ones(1 + count, np.float32),
    rewards=np.zeros(1 + count, np.float32),
    truncated=False,
  )
  return Episode(
    episode_id=f"{serial}.{sample}",
    task_serial=serial,
    sample=sample,
    attempt=0,
    group=serial,
    trajectories=(row,),
    status="done",
    reward=0.0,
    incarnation=incarnation,
    finished=time.monotonic(),
  )


def serials(batch: list[Episode]) -> list[int]:
  return [e.task_serial for e in batch]


def test_admission_stops_at_the_bound_and_resumes_after_release():
  queue = TrajectoryQueue(batch_size=2, max_staleness=1)
  assert [queue.admit() for _ in range(5)] == [True] * 4 + [False]
  for serial in range(2):
    queue.put(episode(serial))
  assert not queue.admit()  # finished episodes still stand in the way
  queue.get(2, Version(0, 0))
  assert not queue.admit()  # and so do those in training
  queue.release()
  assert [queue.admit() for _ in range(3)] == [True, True, False]
  queue.check()
  assert queue.counters() == {
    "started": 6,
    "trained": 2,
    "dropped": 0,
    "failed": 0,
    "queued": 0,
    "running": 4,
    "in_training": 0,
  }


def test_dropped_and_failed_episodes_free_their_room_at_once():
  queue = TrajectoryQueue(batch_size=2, max_staleness=0)
  calls = []
  queue.listen(lambda: calls.append(1))
  assert queue.admit()
  assert queue.admit()
  assert not queue.admit()
  queue.fail(1, "EnvFailure")
  assert queue.admit()
  queue.drop(1, "stale", [7])
  assert queue.admit()
  assert len(calls) == 2
  counters = queue.counters()
  assert counters["failed/EnvFailure"] == counters["dropped/stale"] == 1
  queue.check()


def test_the_first_to_finish_form_the_batch_which_is_sorted():
  queue = TrajectoryQueue(batch_size=3, max_staleness=1)
  for _ in range(6):
    queue.admit()
  for serial in (5, 0, 4, 1, 2, 3):
    queue.put(episode(serial))
  assert serials(queue.get(3, Version(0, 0))) == [0, 4, 5]
  assert serials(queue.get(3, Version(0, 0))) == [1, 2, 3]
  assert queue.serials() == set(range(6))
  queue.release()
  assert queue.serials() == set()


def test_groups_are_complete_before_they_are_handed_out():
  queue = TrajectoryQueue(batch_size=4, max_staleness=1, group_size=2)
  for _ in range(4):
    assert queue.admit(2)
  assert not queue.admit(2)
  for serial, sample in ((0, 1), (1, 0), (2, 0), (2, 1), (3, 0)):
    queue.put(episode(serial, sample))
  assert queue.abandon(1, "group_incomplete") == 1
  queue.fail(1, "EnvFailure", 1)
  queue.put(episode(0, 0))
  queue.check()
  batch = queue.get(4, Version(0, 0))
  assert [e.sort_key for e in batch] == [(0, 0), (0, 1), (2, 0), (2, 1)]
  assert queue.counters()["queued"] == 1  # 3.0 waits for 3.1
  with pytest.raises(ValueError, match="multiple of group_size = 2"):
    queue.get(3, Version(0, 0))


@pytest.mark.parametrize("reason", ["abandoned", "stale", "incarnation"])
def test_who_finishes_after_its_group_was_lost_is_dropped_and_nothing_is_remembered(reason):
  queue = TrajectoryQueue(batch_size=3, max_staleness=1, stale="drop", group_size=3)
  calls = []
  queue.listen(lambda: calls.append(1))
  assert queue.admit(3)
  assert queue.admit(3)
  queue.put(episode(7, 0, versions=(0, 1)))
  for sample in range(3):
    queue.put(episode(8, sample, versions=(2,), incarnation=int(reason == "incarnation")))
  if reason == "abandoned":
    assert queue.abandon(7, "group_incomplete") == 1
    version = Version(0, 1)
  else:  # found at the pop, in a group that is not complete
    version = Version(1, 1) if reason == "incarnation" else Version(0, 2)
  assert serials(queue.get(3, version)) == [8, 8, 8]
  assert queue.lost_groups() == {7}
  assert queue.counters()["queued"] == 0
  before = len(calls)
  queue.put(episode(7, 1, versions=(2,)))
  assert len(calls) == before + 1  # its room came back
  assert queue.serials() == {8}
  queue.drop(1, "group_incomplete", [4], 7)
  counters = queue.counters()
  assert (counters["dropped"], counters["queued"], counters["running"]) == (3, 0, 0)
  assert queue.lost_groups() == set()
  queue.check()


def test_mask_keeps_stale_episodes_and_drop_does_not():
  for stale, expected in (("mask", [0, 1]), ("drop", [1, 2])):
    queue = TrajectoryQueue(batch_size=2, max_staleness=1, stale=stale)
    for _ in range(3):
      queue.admit()
    for serial, versions in enumerate(((2, 3, 4, 4), (3, 4), (4,))):
      queue.put(episode(serial, versions=versions))
    assert serials(queue.get(2, Version(0, 4))) == expected
    queue.check()
    metrics = queue.metrics()
    lost = 1 if stale == "mask" else 4
    total = 6 if stale == "mask" else 7
    assert metrics["queue/wasted_token_share"] == pytest.approx(lost / total)
    longest = 0.25 if stale == "mask" else 1.0
    shares = [metrics[f"queue/wasted_token_share_q{q}"] for q in (1, 2, 3, 4)]
    assert longest in shares
    assert shares[0] == 0


def test_episodes_of_another_incarnation_are_dropped_by_name():
  queue = TrajectoryQueue(batch_size=1, max_staleness=1)
  queue.admit()
  queue.admit()
  queue.put(episode(0, incarnation=0))
  queue.put(episode(1, incarnation=1))
  assert serials(queue.get(1, Version(1, 0))) == [1]
  assert queue.counters()["dropped/incarnation"] == 1
  queue.check()


def test_a_stall_names_what_runs_and_what_is_held():
  queue = TrajectoryQueue(batch_size=1, max_staleness=0)
  queue.report_with(lambda: "the oldest is episode 3.0.0 (task t3), turn 2, last event 'env step'")
  queue.admit()
  beats = []
  with pytest.raises(
    QueueStalled, match=r"0.2 s.*'running': 1.*t3\), turn 2, last event 'env step'"
  ):
    queue.get(1, Version(0, 0), timeout=0.2, heartbeat=0.05, on_wait=beats.append)
  assert len(beats) >= 2
  assert beats[0]["running"] == 1
  queue.put(episode(3))
  queue.get(1, Version(0, 0))
  with pytest.raises(QueueStalled, match="1 are in training: release"):
    queue.get(1, Version(0, 1), timeout=0.05)


def test_death_is_raised_at_once_and_a_stop_after_the_last_batch():
  queue = TrajectoryQueue(batch_size=1, max_staleness=1)
  queue.admit()
  queue.put(episode(0))
  queue.died("the rollout workers were stopped")
  assert serials(queue.get(1, Version(0, 0))) == [0]
  with pytest.raises(WorkersDied, match="were stopped"):
    queue.get(1, Version(0, 0))
  assert not queue.admit()

  queue = TrajectoryQueue(batch_size=1, max_staleness=1)
  cause = OSError("disk gone")
  threading.Timer(0.1, queue.died, [cause]).start()
  with pytest.raises(WorkersDied) as caught:
    queue.get(1, Version(0, 0), timeout=30)
  assert caught.value.__cause__ is cause


def test_forced_lag_holds_a_batch_until_others_wait_behind_it():
  queue = TrajectoryQueue(batch_size=2, max_staleness=2, min_staleness=2)
  assert all(queue.admit() for _ in range(6))
  for serial in range(5):
    queue.put(episode(serial))
  stop = threading.Event()
  stop.set()
  assert queue.get(2, Version(0, 0), stop=stop) == []  # two batches are not three
  queue.put(episode(5))
  for step in range(4):  # what is trained at a step was started two steps before
    assert serials(queue.get(2, Version(0, step))) == [2 * step, 2 * step + 1]
    queue.release()
    for serial in (6 + 2 * step, 7 + 2 * step):
      assert queue.admit()
      queue.put(episode(serial))
    assert not queue.admit()
  queue.check()


def test_nothing_enters_without_admission():
  queue = TrajectoryQueue(batch_size=1, max_staleness=0)
  with pytest.raises(ValueError, match="1 episodes leave, but 0 are running"):
    queue.put(episode(0))
  for bad in (
    {"batch_size": 3, "group_size": 2},
    {"max_staleness": -1},
    {"stale": "keep"},
    {"min_staleness": 1},
  ):
    with pytest.raises(ValueError):
      TrajectoryQueue(**{"batch_size": 2, "max_staleness": 0, **bad})


def test_many_threads_lose_nothing():
  queue = TrajectoryQueue(batch_size=8, max_staleness=1)
  stop = threading.Event()
  numbers = iter(range(10**9))
  lock = threading.Lock()

  def produce(seed: int) -> None:
    rng = np.random.default_rng(seed)
    while not stop.is_set():
      if not queue.admit():
        time.sleep(0.0005)
        continue
      with lock:
        serial = next(numbers)
      match rng.integers(10):
        case 0:
          queue.fail(1, "EnvFailure")
        case 1:
          queue.drop(1, "stale")
        case _:
          queue.put(episode(serial))

  threads = [threading.Thread(target=produce, args=(seed,)) for seed in range(4)]
  for thread in threads:
    thread.start()
  seen: set[int] = set()
  for step in range(50):
    batch = queue.get(8, Version(0, step), timeout=30)
    queue.check()
    assert not seen & set(serials(batch))
    seen |= set(serials(batch))
    queue.release()
  stop.set()
  for thread in threads:
    thread.join()
  queue.check()
  assert queue.counters()["trained"] == len(seen) == 400
