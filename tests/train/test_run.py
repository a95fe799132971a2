"""The quickstart, shortened: every stage, learning, and what a run leaves behind."""

import asyncio
import json

import numpy as np
import pytest

from sao_jax import loader
from sao_jax.config import ConfigError
from sao_jax.data.chat import make_chat
from sao_jax.envs.make import make_env
from sao_jax.envs.sandbox import make_sandbox
from sao_jax.train.evaluate import Evaluation, paired_gain
from sao_jax.train.jsonlines import read_rows
from sao_jax.train.preview import preview
from sao_jax.train.run import check_lengths, train
from sao_jax.train.sft import tool_output
from sao_jax.train.value_pretrain import GateNotMet, check_gate
from sao_jax.types import Message, Task

QUICKSTART = "configs/quickstart.py"


def test_preview_counts_and_refuses_before_any_work():
  config = loader.load(QUICKSTART, {})
  policy, critic, pretraining, *_ = preview(config)
  assert policy == "policy: 238,464 trained and 0 frozen parameters"
  assert critic == "critic: 196,673 trained and 37,760 frozen parameters"
  assert pretraining.endswith("234,433 trained and 0 frozen parameters")
  with pytest.raises(ConfigError, match="nothing is frozen"):
    preview(loader.load(QUICKSTART, {"critic.trainable": "('.*',)"}))
  with pytest.raises(ConfigError, match="matches none"):
    train(loader.load(QUICKSTART, {"critic.trainable": "('experts',)"}))


def test_traces_show_what_the_environment_shows():
  """An expression that fails is cut in a trace exactly as the tool's observation is."""
  config = loader.load(QUICKSTART, {})

  async def observe(code):
    with make_sandbox(config.sandbox) as sandbox:
      env = make_env(config.env, sandbox)()
      await env.reset(Task("t", [Message(role="user", content="1+1")], {"answer": "2"}))
      step = await env.step(Message(role="assistant", content=f"<python>{code}</python>"))
      await env.close()
    return step.messages[0]["content"]

  for code in ("1+2+3", "1+2+3=", "99*99*99*99", "1/0"):
    assert tool_output(config)(code) == asyncio.run(observe(code))


def test_tasks_that_do_not_fit_an_episode_are_refused_before_any_work(tmp_path):
  changes = {"task.kind": "word_problem", "run_dir": str(tmp_path)}
  with pytest.raises(ConfigError, match=r"SFT trace has \d+ tokens.*env.max_tokens = 48"):
    train(loader.load(QUICKSTART, changes))
  room = {"env.max_tokens": "192", "rollout.max_len": "192", "packing.lengths": "(192,)"}
  config = loader.load(QUICKSTART, changes | room)
  check_lengths(config, make_chat(config.chat))


def test_the_gate_stops_rl_with_both_numbers_and_the_way_out(tmp_path):
  config = loader.load(
    QUICKSTART, {"critic.min_explained_variance": "0.3", "run_dir": str(tmp_path)}
  )
  result = tmp_path / "value" / "result.json"
  result.parent.mkdir()
  result.write_text(json.dumps({"explained_variance": 0.31, "corpus": 896}))
  check_gate(config)
  result.write_text(json.dumps({"explained_variance": 0.123, "corpus": 896}))
  with pytest.raises(
    GateNotMet, match=r"(?s)not started.*896.*0\.123.*0\.3 .*value_pretrain\.rollouts"
  ):
    check_gate(config)


def test_paired_gain_by_hand():
  before = Evaluation(np.zeros(100, np.float32), ())
  after = Evaluation(np.r_[np.ones(60), np.zeros(40)].astype(np.float32), ())
  gain, low, high = paired_gain(before, after)
  assert gain == pytest.approx(0.6)
  # the binomial standard error is .049
  assert low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.02)
  assert high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.02)
  assert paired_gain(before, before) == (0.0, 0.0, 0.0)


@pytest.mark.slow
def test_the_quickstart_learns(tmp_path):
  changes = {"num_steps": "25", "evaluate.problems": "200", "run_dir": str(tmp_path)}
  results = train(loader.load(QUICKSTART, changes))
  assert 0.2 <= results["sampled/before"] <= 0.55
  assert results["sampled/gain"] >= 0.2
  assert results["sampled/gain_low"] > 0
  assert json.loads((tmp_path / "results.json").read_text()) == results
  rows = read_rows(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(26))
  assert (tmp_path / "curves.png").stat().st_size > 20_000
  assert max(row.get("staleness/trained_max", 0) for row in rows) <= 2
  assert max(row.get("staleness/mixed_versions", 0) for row in rows) > 0
