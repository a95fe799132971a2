"""Tables and figures of experiments, by hand."""

import json

import numpy as np
import pytest

from sao_jax.outcome import RunFailed
from sao_jax.train import tables
from sao_jax.train.tables import Results


def rows(rewards, tokens=10.0, seconds=2.0, **extra):
  """A run as metrics.jsonl has it: the evaluation before RL, steps, the evaluation after."""
  steps = [
    {"step": i, "episode/reward": r, "batch/action_tokens": tokens, "time/step": seconds}
    for i, r in enumerate(rewards, 1)
  ]
  for name, values in extra.items():
    for row, value in zip(steps, values, strict=True):
      row[name.replace("__", "/")] = value
  steps[-1]["eval/sampled"] = rewards[-1]
  return [{"step": 0, "eval/sampled": 0.125}, *steps]


def results(**changes):
  runs = {
    "sao d=0": {0: rows([0.0, 0.5, 1.0, 1.0]), 1: rows([0.0, 0.0, 0.5, 0.5])},
    "grpo d=0": {0: rows([0.0, 0.0, 0.0, 0.25], tokens=20.0), 1: rows([0.0, 0.5, 0.5, 0.25])},
  }
  columns = {"held-out reward": tables.final("eval/sampled")}
  return Results(**{"runs": runs, "columns": columns, "baseline": "sao d=0",
                    "compared": ["held-out reward"]} | changes)  # fmt: skip


def test_measures_leave_out_what_is_before_training():
  run = rows([1.0, 2.0, 3.0, 6.0])
  assert tables.mean("episode/reward")(run) == 3.0
  assert tables.last("episode/reward")(run) == 6.0
  assert tables.last("episode/reward", 0.5)(run) == 4.5
  assert tables.largest("episode/reward")(run) == 6.0
  assert tables.median("episode/reward")(run) == 2.5
  assert tables.per_second("batch/action_tokens")(run) == 5.0
  assert tables.final("eval/sampled")(run) == 6.0
  assert tables.mean("time/prox", missing=0.0)(run) == 0.0
  with pytest.raises(ValueError, match="no metric 'time/prox'"):
    tables.mean("time/prox")(run)


def test_equal_tokens_and_equal_time_are_of_the_smallest_run():
  found = results()
  assert found.budget("batch/action_tokens") == 40.0
  assert found.budget("time/step") == 6.0  # of three steps: the first compiles
  # 40 tokens are four steps of one run and two of the other; the last fifth is the last step
  at = tables.at_budget("batch/action_tokens", 40.0)
  assert at(found.runs["sao d=0"][0]) == 1.0
  assert at(rows([0.0, 0.75, 1.0, 1.0], tokens=20.0)) == 0.75
  assert tables.at_budget("batch/action_tokens", 5.0)(rows([0.25, 1.0])) == 0.25  # less than a step


def test_a_first_step_that_compiles_costs_no_time():
  run = rows([0.25, 0.5, 0.75, 1.0])
  slow = rows([0.25, 0.5, 0.75, 1.0], time__step=[60.0, 2.0, 2.0, 2.0])
  both = results(runs={"sao d=0": {0: run}, "grpo d=0": {0: slow}})
  assert both.budget("time/step") == 6.0
  for budget, reward in ((0.0, 0.25), (2.0, 0.5), (4.0, 0.75), (6.0, 1.0)):
    assert tables.at_budget("time/step", budget)(slow) == reward
    assert tables.at_budget("time/step", budget)(run) == reward
  assert tables.per_second("batch/action_tokens")(slow) == 5.0
  assert tables.median("time/step")(slow) == 2.0
  assert tables.per_second("batch/action_tokens")(rows([0.25])) == 5.0  # nothing but the first


def test_differences_are_paired_by_seed():
  found = results()
  np.testing.assert_allclose(
    found.difference("grpo d=0", "held-out reward"), [0.25 - 1.0, 0.25 - 0.5]
  )
  lost = {**found.runs, "grpo d=0": {1: found.runs["grpo d=0"][1]}}
  np.testing.assert_allclose(results(runs=lost).difference("grpo d=0", "held-out reward"), [-0.25])


def test_the_table_has_no_empty_cell_and_names_what_failed():
  failures = {"grpo d=0, seed 2": "sao-jax: 6 updates in a row were not finite"}
  text = tables.markdown(results(failures=failures), "Who wins?", "sao-jax experiment x.py")
  assert text.startswith("Who wins?\n\n    sao-jax experiment x.py\n")
  head, _, *body = [line for line in text.splitlines() if line.startswith("|")]
  assert head.count("|") == 7
  assert [line.split(" | ")[:2] for line in body] == [["| sao d=0", "2"], ["| grpo d=0", "2 of 3"]]
  for line in body:
    assert all(cell.strip() for cell in line.strip("|").split("|"))
  assert "-0.500 [-0.750, -0.250]" in body[1]
  assert "Failed: grpo d=0, seed 2: sao-jax: 6 updates in a row were not finite" in text


def test_several_columns_may_be_compared():
  found = results(
    columns={"held-out reward": tables.final("eval/sampled"), "tokens": tables.mean(tables.TOKENS)},
    compared=["held-out reward", "tokens"],
  )
  head, _, sao, grpo = (
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in tables.markdown(found, "", "").splitlines()
    if line.startswith("|")
  )
  assert head[-2:] == ["held-out reward, minus sao d=0", "tokens, minus sao d=0"]
  assert sao[-2:] == ["0", "0"]
  assert grpo[-2:] == ["-0.500 [-0.750, -0.250]", "5.000 [0.000, 10.0]"]


def test_runs_that_learn_nothing_have_no_views_of_reward():
  found = results(learns=False)
  assert list(found.all_columns()) == ["held-out reward"]
  assert "sampled tokens" not in tables.markdown(found, "", "")
  assert set(found.plain()["runs"][0]) == {"arm", "seed", "held-out reward"}


def test_one_seed_makes_no_claim():
  one = {arm: {0: runs[0]} for arm, runs in results().runs.items()}
  text = tables.markdown(results(runs=one), "Who wins?", "x")
  assert "One seed: no intervals, no claim." in text
  assert "[" not in text


def test_what_was_not_finite_is_said_and_not_passed_over():
  run = rows([0.0, 0.5, 1.0], policy__loss=[0.5, None, None])
  assert np.isnan(tables.last("policy/loss")(run))
  assert np.isnan(tables.final("policy/loss")(run))
  assert tables.interval([0.25, float("nan")]) == "not finite"
  broken = results(
    runs={"sao d=0": {0: run}}, columns={"loss": tables.last("policy/loss")}, compared=["loss"]
  )
  assert "| not finite |" in tables.markdown(broken, "", "")
  assert broken.plain()["runs"][0]["loss"] is None


def test_a_metric_that_no_run_has_is_named():
  for measure in (
    tables.final,
    tables.mean,
    tables.last,
    tables.largest,
    tables.median,
    tables.per_second,
  ):
    wrong = results(columns={"greedy": measure("eval/greedy")}, compared=["greedy"])
    with pytest.raises(RunFailed, match=r"sao d=0, seed 0: the run has no metric 'eval/greedy'"):
      tables.markdown(wrong, "", "")


def test_small_numbers_are_not_rounded_away():
  assert tables.interval([1e-6]) == "1e-06"
  assert tables.interval([1e-6, 3e-6]) == "2e-06 [1e-06, 3e-06]"
  assert tables.interval([12345.6]) == "12,346"
  assert tables.interval([0.0]) == "0.000"


def test_an_arm_without_any_run_is_a_row():
  runs = results().runs | {"grpo d=0": {}}
  failures = {"grpo d=0, seed 0": "died", "grpo d=0, seed 1": "died"}
  text = tables.markdown(results(runs=runs, failures=failures), "", "")
  assert "| grpo d=0 | 0 of 2 | failed | failed | failed | no seed to compare |" in text


def test_numbers_go_to_json():
  plain = results().plain()
  assert json.loads(json.dumps(plain)) == plain
  assert plain["runs"][0]["held-out reward"] == 1.0
  assert len(plain["runs"]) == 4


def test_the_figure_has_a_line_for_each_arm(tmp_path):
  tables.draw(results(), ("episode/reward", "never/recorded"), tmp_path / "x.png")
  assert (tmp_path / "x.png").stat().st_size > 20_000
  arms = results().runs
  assert tables._style("sao d=0", arms)["color"] != tables._style("grpo d=0", arms)["color"]
  assert tables._style("sao d=0", arms)["linestyle"] == tables._style("grpo d=0", arms)["linestyle"]
