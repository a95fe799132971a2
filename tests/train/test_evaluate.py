"""avg@k and pass@k by hand, and evaluations that neither vary nor disturb what runs beside them."""

import dataclasses
import itertools
import json
import math
import threading

import numpy as np
import pytest

from sao_jax.rollout.service import RolloutService
from sao_jax.train import evaluate as ev
from sao_jax.train.run import held_out
from sao_jax.train.state import load_policy
from tests.train.test_sao import FailsOnce, Talkative, tiny_config


def test_pass_at_k_by_hand():
  # 4 samples, 2 passed: of the 6 pairs, one holds none that passed
  assert ev.pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
  assert ev.pass_at_k(4, 2, 1) == 0.5
  assert ev.pass_at_k(4, 2, 3) == 1.0
  assert ev.pass_at_k(4, 0, 4) == 0.0
  assert ev.pass_at_k(1000, 500, 1000) == 1.0


@pytest.mark.parametrize("n", [1, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    share = sum(map(any, subsets)) / len(subsets)
    assert ev.pass_at_k(n, c, k) == pytest.approx(share)
    assert ev.pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


@pytest.mark.parametrize("numbers", [(4, 2, 5), (4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_pass_at_k_refuses_what_it_cannot_know(numbers):
  n, c, k = numbers
  with pytest.raises(ValueError, match=rf"k = {k} of n = {n} samples, c = {c} of them"):
    ev.pass_at_k(*numbers)


def test_summary_by_hand():
  rewards = np.array([[1, 0, 0], [1, 1, 1], [0.5, 0.99, 0]], np.float32)  # part marks do not pass
  evaluation = ev.Evaluation(rewards)
  summary = evaluation.summary()
  assert (summary["k"], summary["problems"]) == (3, 3)
  assert summary["avg"] == pytest.approx((1 / 3 + 1 + 1.49 / 3) / 3)
  assert summary["avg_low"] < summary["avg"] < summary["avg_high"]
  assert summary["pass"] == pytest.approx({"1": (1 / 3 + 1) / 3, "2": (2 / 3 + 1) / 3, "3": 2 / 3})
  for size, p in summary["pass"].items():
    assert 0 <= summary["pass_low"][size] < p < summary["pass_high"][size] <= 1
  assert json.loads(json.dumps(summary)) == summary
  assert ev.metrics({"sampled": evaluation}) == {
    "eval/sampled": evaluation.mean,
    "eval/pass_at_k": pytest.approx(2 / 3),
  }


def test_intervals_are_over_tasks_not_samples():
  """Copies of a sample add no evidence; the half width for 100 tasks at ½ is 1.96 · .05."""
  once = ev.Evaluation(np.tile([[0.0], [1.0]], (50, 1)))
  copied = ev.Evaluation(np.tile([[0.0], [1.0]], (50, 16)))
  assert copied.interval() == once.interval()
  low, high = once.interval()
  assert (low, high) == (pytest.approx(0.402, abs=0.02), pytest.approx(0.598, abs=0.02))
  assert copied.passes()[16] == once.passes()[1]


@pytest.fixture(scope="module")
def config():
  config = tiny_config(max_staleness=0)
  config.evaluate.samples = 3
  return config


@pytest.fixture(scope="module")
def policy(config):
  return load_policy(config)


@pytest.fixture
def service(config, policy):
  with RolloutService(config, policy.config, policy.params, policy.chat) as service:
    make_env = service.make_env
    service.make_env = lambda: Talkative(make_env())  # several turns
    yield service


def bits(episodes):
  """Everything that an episode would bring into training."""
  return [
    (e.task_serial, e.sample, e.reward, e.status, t.tokens.tolist(), t.rollout_logprobs.tobytes())
    for e in episodes
    for t in e.trajectories
  ]


def test_equal_weights_give_equal_results(config, service):
  tasks = held_out(config)
  for options in ({"greedy": True}, {}):
    first, second = (ev.evaluate(config, service, tasks, **options) for _ in range(2))
    assert bits(first.episodes) == bits(second.episodes)
    np.testing.assert_array_equal(first.rewards, second.rewards)
  assert first.rewards.shape == (8, 3)
  assert [(e.task_serial, e.sample) for e in first.episodes[:4]] == [(0, 0), (0, 1), (0, 2), (1, 0)]
  assert first.episodes[0].trajectories[0].tokens.tolist() != (
    first.episodes[1].trajectories[0].tokens.tolist()
  )


def test_sampling_is_what_the_config_says(config, service):
  tasks = held_out(config)
  greedy = ev.evaluate(config, service, tasks, greedy=True)
  assert greedy.k == 1  # more would be copies

  def changed(**leaves):
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, **leaves))

  cold = ev.evaluate(changed(temperature=0.0), service, tasks)
  assert bits(cold.episodes) == bits(greedy.episodes)
  for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
    only = ev.evaluate(changed(**narrow, samples=1), service, tasks)
    for a, b in zip(only.episodes, greedy.episodes, strict=True):
      np.testing.assert_array_equal(a.trajectories[0].tokens, b.trajectories[0].tokens)
  config_at_two = changed(temperature=-1.0)
  config_at_two.rollout = dataclasses.replace(config.rollout, temperature=2.0)
  hot = ev.evaluate(config_at_two, service, tasks).episodes[0].trajectories[0]
  assert set(hot.temperature[hot.action_mask]) == {2.0}


def test_an_evaluation_beside_a_run_changes_nothing_of_it(config, service):
  """Here the run and the evaluation fill the same slots at the same time."""
  tasks = held_out(config)
  run = {"temperature": 1.0, "seed": 7, "samples": 4}
  alone = bits(service.run(tasks, **run))
  evaluated = ev.evaluate(config, service, tasks)
  together, under_way = [], threading.Event()

  def other():
    together.extend(service.run(tasks, **run, on_done=lambda _: under_way.set()))

  thread = threading.Thread(target=other)
  thread.start()
  assert under_way.wait(60)
  beside = ev.evaluate(config, service, tasks)
  thread.join()
  assert bits(together) == alone
  assert bits(beside.episodes) == bits(evaluated.episodes)
  overlap = min(e.started for e in beside.episodes) < max(e.finished for e in together)
  assert overlap


def test_a_short_queue_is_shared_not_overrun(policy):
  """4 slots and 9 waiting: 12 training episodes leave room for one of the evaluation."""
  config = tiny_config(max_staleness=0, max_queued=9, attempts=1)
  with RolloutService(config, policy.config, policy.params, policy.chat) as service:
    most, submit = [0], service.driver.submit

    def counted(request):
      submit(request)
      most[0] = max(most[0], service.driver.open_requests)

    service.driver.submit = counted
    ev.evaluate(config, service, held_out(config))
    assert most == [1]


def test_failures_of_infrastructure_do_not_change_the_result(config, service):
  tasks = held_out(config)
  expected = bits(ev.evaluate(config, service, tasks, greedy=False).episodes)
  make_env, seen = service.make_env, {}
  service.make_env = lambda: FailsOnce(make_env(), seen)
  again = ev.evaluate(config, service, tasks)
  assert max(e.attempt for e in again.episodes) == 1
  assert bits(again.episodes) == expected


def test_weights_that_move_meanwhile_are_an_error(config, policy, service):
  def publish(done):
    if done == 1:
      service.publish(policy.params, 1)

  with pytest.raises(ev.WeightsMoved, match=r"2 policy versions, \(0, 0\) to \(0, 1\)"):
    ev.evaluate(config, service, held_out(config), on_done=publish)


def test_files_of_an_evaluation(config, policy, service, tmp_path):
  tasks, calls = held_out(config), []
  result = ev.evaluate_all(
    config, service, tasks, policy.chat, tmp_path, 60, lambda *call: calls.append(call)
  )
  assert calls == [("sampled", i + 1, 24) for i in range(24)] + [
    ("greedy", i + 1, 8) for i in range(8)
  ]
  folder = tmp_path / "evaluations"
  assert sorted(path.name for path in folder.iterdir()) == [
    "step-000060.greedy.jsonl",
    "step-000060.json",
    "step-000060.sampled.jsonl",
  ]
  summary = json.loads((folder / "step-000060.json").read_text())
  assert summary["step"] == 60
  assert summary["sampled"] == result["sampled"].summary()
  assert summary["greedy"]["k"] == 1
  lines = [json.loads(x) for x in (folder / "step-000060.sampled.jsonl").read_text().splitlines()]
  assert [(line["id"], line["serial"]) for line in lines] == [(t.id, t.serial) for t in tasks]
  assert [line["rewards"] for line in lines] == result["sampled"].rewards.tolist()
  for i, line in enumerate(lines):
    assert line["answer"] == tasks[i].meta["answer"]
    for j, reply in enumerate(line["replies"]):
      episode = result["sampled"].episodes[3 * i + j]
      trajectory = episode.trajectories[0]
      actions = trajectory.tokens[trajectory.action_mask]
      assert reply.replace(ev.BETWEEN_TURNS, "") == policy.chat.decode(actions)
      assert reply.count(ev.BETWEEN_TURNS) == episode.metrics["turns"] - 1
      assert line["actions"][j] == len(actions)
      assert line["statuses"][j] == episode.status
