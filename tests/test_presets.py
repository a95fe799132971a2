"""The papers' configurations say what the papers say, and resolve without their models."""

import pathlib
import subprocess
import sys

import pytest

from sao_jax import loader
from sao_jax.config import ConfigError
from sao_jax.envs.make import make_env

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

SAO = {
  "batch_size": 128,
  "group_size": 1,
  "env.max_tokens": 131_072,
  "rollout.max_len": 131_072,
  "rollout.temperature": 1.0,
  "rollout.top_p": 1.0,
  "loss.name": "dis",
  "advantage.name": "gae",
  "advantage.lambda_": -1.0,  # length-adaptive
  "advantage.alpha": 1.5,
  "advantage.skip_observations": True,
  "policy.lr": 1e-6,
  "critic.lr": 5e-6,
  "critic.lambda_": 1.0,
  "critic.warmup_steps": 10,
  "critic.updates_per_step": 2,
}
QWEN3_30B = {
  "model.num_layers": 48,
  "model.d_model": 2048,
  "model.num_experts": 128,
  "model.experts_per_token": 8,
  "model.d_ff": 768,
}
PUBLISHED = {
  # SAO, arXiv 2607.07508
  "sao_math_qwen3_30b_a3b": SAO
  | QWEN3_30B
  | {"env.max_turns": 50, "loss.eps_low": 0.3, "loss.eps_high": 5.0, "evaluate.samples": 16},
  "sao_swe_qwen3_30b_a3b": SAO
  | QWEN3_30B
  | {"env.max_turns": 300, "loss.eps_low": 0.8, "loss.eps_high": 3.0, "evaluate.samples": 4},
  "grpo_math_qwen3_30b_a3b": QWEN3_30B
  | {
    "batch_size": 128,
    "group_size": 8,  # 16 prompts
    "advantage.name": "group",
    "loss.name": "ppo",
    "critic.enabled": False,
    "env.max_turns": 50,
    "env.max_tokens": 131_072,
    "policy.lr": 1e-6,
  },
  "sft_tir_qwen3_30b_a3b": QWEN3_30B | {"sft.epochs": 3},
  # A-3PO, arXiv 2512.06547
  "a3po_gsm8k_qwen25_1_5b": {
    "batch_size": 1024,
    "group_size": 4,
    "loss.name": "a3po",
    "loss.alpha_at_zero": 0.0,
    "loss.eps_low": 0.4,
    "loss.eps_high": 0.4,
    "loss.max_behavior_weight": 5.0,
    "advantage.reward_scale": 10.0,
    "advantage.reward_bias": -0.5,
    "advantage.normalize": "batch",
    "policy.lr": 1.7e-5,
    "policy.weight_decay": 0.017,
    "policy.b2": 0.999,
    "policy.minibatches": 1,
    "env.max_turn_tokens": 1024,
    "num_steps": 300,
    "model.num_layers": 28,
    "model.d_model": 1536,
    "model.qkv_bias": True,
  },
  "a3po_dapo_qwen3_8b": {
    "group_size": 16,
    "loss.name": "a3po",
    "policy.lr": 1e-6,
    "env.max_turn_tokens": 20_480,
    "model.num_layers": 36,
    "model.d_model": 4096,
  },
}
PARAMETERS = {
  "sao_math_qwen3_30b_a3b": 30_532_122_624,
  "a3po_gsm8k_qwen25_1_5b": 1_543_714_304,
  "a3po_dapo_qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_numbers(name):
  found = dict(loader.leaves(loader.load(str(CONFIGS / f"{name}.py"))))
  wrong = {p: (found[p], value) for p, value in PUBLISHED[name].items() if found[p] != value}
  assert not wrong
  assert found["name"] == name


def test_no_preset_is_without_its_numbers():
  assert {path.stem for path in CONFIGS.glob("*qwen*.py")} == set(PUBLISHED)


@pytest.mark.slow  # each is a process of its own
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_resolves_without_being_built(name):
  command = "sft" if name.startswith("sft") else "train"
  done = subprocess.run(
    [sys.executable, "-m", "sao_jax.cli", command, f"--config={CONFIGS / name}.py", "--dry-run"],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert f"name = '{name}'" in done.stdout
  assert "memory, estimated in all" in done.stdout
  assert f"policy: {PARAMETERS.get(name, 30_532_122_624):,} trained" in done.stdout
  if command == "sft":
    assert "sft learning rate: " in done.stdout


def test_the_environment_that_is_not_written_yet_is_refused_by_name():
  config = loader.load(str(CONFIGS / "sao_swe_qwen3_30b_a3b.py"))
  with pytest.raises(ValueError, match="'coding' is not written yet"):
    make_env(config.env)


def test_a_preset_that_is_run_says_which_file_it_wants(tmp_path):
  from sao_jax.train.run import train

  config = loader.load(
    str(CONFIGS / "a3po_gsm8k_qwen25_1_5b.py"), {"run_dir": str(tmp_path / "run")}
  )
  with pytest.raises(ConfigError, match=r"weights\.path = '' is not a folder"):
    train(config)
