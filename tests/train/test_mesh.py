"""Checkpoints cross meshes: saved on eight devices, gone on with on four and on one."""

import json
import os
import subprocess
import sys

import jax
import pytest

from sao_jax.config import ConfigError, MeshConfig
from sao_jax.sharding import make_mesh

SCRIPT = """
import json, shutil, sys
from pathlib import Path
import jax, numpy as np
from sao_jax import loader
from sao_jax.train.preemption import Preemption
from sao_jax.train.sft import sft
from sao_jax.train.state import load_policy

def trained(folder, **mesh):
  changes = {"run_dir": str(folder), "sft.steps": "20", "model.moe_impl": "dense", "sft.lr": "1e-3"}
  changes |= {f"mesh.{axis}": str(n) for axis, n in mesh.items()}
  config = loader.load("tests/train/tiny.py", changes)
  return sft(config, load_policy(config), Preemption()).params

root = Path(sys.argv[1])
whole = trained(root / "whole", fsdp=4, expert=2)
spread = {len(x.sharding.device_set) for x in jax.tree.leaves(whole)}
split = sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(whole))
gaps = []
for name, mesh in (("four", {"fsdp": 4}), ("one", {})):
  target = root / name / "sft" / "checkpoints"
  target.mkdir(parents=True)
  shutil.copytree(root / "whole" / "sft" / "checkpoints" / "10", target / "10")
  other = trained(root / name, **mesh)
  pairs = zip(jax.tree.leaves(whole), jax.tree.leaves(other), strict=True)
  gaps.append(max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs))
  rows = [json.loads(line) for line in (root / name / "sft" / "metrics.jsonl").open()]
  assert rows[0]["step"] == 11, rows[0]  # it really went on from step 10
print(json.dumps([sorted(spread), split, gaps]))
"""

LOOP = """
import json, sys
from pathlib import Path
import jax, numpy as np
from sao_jax import loader
from sao_jax.data.packing import pack
from sao_jax.train.checkpoint import Checkpoints
from sao_jax.train.state import load_policy, make_critic
from sao_jax.train.updates import LoopSteps
from sao_jax.types import Version
from tests.train.test_steps import episode

def make(**mesh):
  # Of one expert the weight is 1: its router would get no gradient but rounding, which Adam scales up.
  changes = {"model.moe_impl": "dense", "model.num_experts": "4", "model.experts_per_token": "2"}
  changes |= {f"mesh.{axis}": str(n) for axis, n in mesh.items()}
  config = loader.load("tests/train/tiny.py", changes)
  policy = load_policy(config)
  return config, LoopSteps(config, policy, *make_critic(policy), lambda line: None)

def train(config, steps, numbers):
  for number in numbers:
    rng = np.random.default_rng(number)
    episodes = [episode(i, rng) for i in range(config.batch_size)]
    metrics = jax.device_get(steps(pack(episodes, Version(0, 0), config)[0], number))
    assert not metrics["policy/nonfinite"] and not metrics["critic/nonfinite"]

def arrays(steps):
  return {"/".join(map(str, path)): x for path, x in jax.tree_util.tree_leaves_with_path(steps.states())}

folder = Path(sys.argv[1])
config, whole = make(fsdp=4, expert=2)
train(config, whole, range(10))
saved = {name: np.asarray(x) for name, x in arrays(whole).items()}
with Checkpoints(folder, config.checkpoint, 1) as checkpoints:
  checkpoints.save(10, whole.states(), {})
  checkpoints.wait()
  others = {}
  for name, mesh in (("four", {"fsdp": 4}), ("one", {})):
    config, others[name] = make(**mesh)
    others[name].restore(checkpoints.restore(others[name].states()).trees)
spread = {len(x.sharding.device_set) for x in jax.tree.leaves(whole.states()) if x.ndim > 1}
split = sum(not x.sharding.is_fully_replicated for x in arrays(whole).values())
for steps in others.values():
  for name, x in arrays(steps).items():
    np.testing.assert_array_equal(saved[name], np.asarray(x), err_msg=name)
train(config, whole, range(10, 20))
moved = max(float(np.abs(np.asarray(x) - saved[n]).max()) for n, x in arrays(whole).items() if "params" in n)
gaps = []
for steps in others.values():
  train(config, steps, range(10, 20))
  one, two = arrays(whole), arrays(steps)
  gaps.append(max(float(np.abs(np.asarray(one[n]) - np.asarray(two[n])).max()) for n in one if "params" in n))
assert moved > 1e-3, moved
print(json.dumps([sorted(spread), split, gaps]))
"""


def test_several_processes_are_refused(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  with pytest.raises(ConfigError, match="4 processes joined"):
    make_mesh(MeshConfig())


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, LOOP], ids=["sft", "loop"])
def test_saved_on_eight_devices_restored_on_four_and_on_one(tmp_path, script):
  environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
  done = subprocess.run(
    [sys.executable, "-c", script, str(tmp_path)],
    capture_output=True,
    text=True,
    timeout=500,
    env=environment,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  devices, split, gaps = json.loads(done.stdout.splitlines()[-1])
  assert devices == [8]
  assert split >= 6  # attention, experts, embeddings, head
  assert max(gaps) <= 1e-5
