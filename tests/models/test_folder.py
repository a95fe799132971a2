"""Folders that transformers writes are read: what was exported is the same policy again."""

import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest

from sao_jax.config import Config, ConfigError, ModelConfig, WeightsConfig
from sao_jax.models import folder, safetensors
from sao_jax.models.export import export_policy
from sao_jax.models.huggingface import CheckpointError
from sao_jax.models.pretrained import WeightsUnavailable, load_pretrained
from sao_jax.train.preview import preview
from tests.models.test_export import CHAT, VARIANTS, model
from tests.models.test_huggingface import IDS, logits


@functools.cache
def made(variant):
  config, params = model(**VARIANTS[variant])
  scratch = tempfile.TemporaryDirectory()  # removed when this is forgotten
  return config, params, export_policy(f"{scratch.name}/out", config, params, CHAT), scratch


def exported(path, variant="qwen3"):
  config, params, folder, _ = made(variant)
  return config, params, pathlib.Path(shutil.copytree(folder, path / "out"))


def edit(path, **changes):
  document = json.loads((path / "config.json").read_text()) | changes
  document = {name: value for name, value in document.items() if value != "gone"}
  (path / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exported_policy_comes_back_whole(tmp_path, variant):
  config, params, path = exported(tmp_path, variant)
  base = ModelConfig(param_dtype=config.param_dtype)
  again, loaded, tokenizer = load_pretrained(WeightsConfig("huggingface", str(path)), base)
  experts = config.experts_per_token if config.num_experts else 0
  assert again == dataclasses.replace(config, experts_per_token=experts)
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(logits(again, loaded, IDS), logits(config, params, IDS))
  assert tokenizer.get_vocab() == CHAT.tokenizer.get_vocab()


def test_weights_in_several_files(tmp_path):
  _, params, path = exported(tmp_path)
  whole = safetensors.SafetensorsFile(path / "model.safetensors")
  parts = {"a.safetensors": list(whole)[::2], "b.safetensors": list(whole)[1::2]}
  for name, tensors in parts.items():
    safetensors.write(path / name, {t: whole[t] for t in tensors})
  (path / "model.safetensors").unlink()
  index = {"weight_map": {t: name for name, tensors in parts.items() for t in tensors}}
  (path / "model.safetensors.index.json").write_text(json.dumps(index))
  _, loaded, _ = folder.load_folder(path)
  for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
    np.testing.assert_array_equal(a, b)
  (path / "b.safetensors").unlink()
  with pytest.raises(CheckpointError, match=r"b\.safetensors"):
    folder.load_folder(path)


def test_a_tied_head_that_is_stored_is_not_read(tmp_path):
  config, params, path = exported(tmp_path, "llama tied")
  file = path / "model.safetensors"
  tensors = dict(safetensors.SafetensorsFile(file))
  head = np.zeros_like(tensors["model.embed_tokens.weight"])
  safetensors.write(file, tensors | {"lm_head.weight": head})
  _, loaded, _ = folder.load_folder(path)
  np.testing.assert_array_equal(logits(config, loaded, IDS), logits(config, params, IDS))


def test_names_of_transformers_5(tmp_path):
  config, _, path = exported(tmp_path)
  edit(path, rope_theta="gone", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
  assert folder.load_folder(path)[0] == dataclasses.replace(
    config, rope_theta=5e5, experts_per_token=0
  )


def test_names_of_transformers_5_for_experts(tmp_path):
  config, params, path = exported(tmp_path, "qwen3_moe")
  edit(path, num_experts="gone", num_local_experts=config.num_experts)
  again, loaded, _ = folder.load_folder(path)
  assert again.num_experts == config.num_experts
  np.testing.assert_array_equal(logits(again, loaded, IDS), logits(config, params, IDS))
  edit(path, num_local_experts="gone")
  with pytest.raises(CheckpointError, match="how many experts"):
    folder.load_folder(path)


@pytest.mark.parametrize("value", [False, "gone"])  # transformers' default is False
def test_experts_whose_weights_are_not_renormalised_are_refused(tmp_path, value):
  _, _, path = exported(tmp_path, "qwen3_moe")
  edit(path, norm_topk_prob=value)
  with pytest.raises(CheckpointError, match="norm_topk_prob"):
    folder.load_folder(path)


def test_the_preview_is_of_the_folder(tmp_path):
  _, params, path = exported(tmp_path)
  size = sum(x.size for x in jax.tree.leaves(params))
  lines = preview(Config(weights=WeightsConfig("huggingface", str(path))))
  assert lines[0] == f"policy: {size:,} trained and 0 frozen parameters"
  with pytest.raises(ConfigError, match=r"config\.json: No such file"):
    preview(Config(weights=WeightsConfig("huggingface", str(tmp_path))))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "gemma3"}, r"model_type = 'gemma3'; known: llama, qwen2"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"scaled \('yarn'\)"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"scaled \('linear'\)"),
    ({"rope_parameters": {"rope_type": "llama3"}}, r"scaled \('llama3'\)"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu', but the Transformer only has 'silu'"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"hidden_size": "gone"}, "lacks 'hidden_size'"),
    ({"num_hidden_layers": 3}, r"missing tensors: model\.layers\.2"),
    ({"num_hidden_layers": 1}, r"unknown tensors: model\.layers\.1"),
    ({"intermediate_size": 25}, r"gate_proj.*shape"),
  ],
)
def test_what_would_compute_something_else_is_refused(tmp_path, changes, message):
  _, _, path = exported(tmp_path)
  edit(path, **changes)
  with pytest.raises(CheckpointError, match=message):
    folder.load_folder(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_missing_or_damaged_file_is_named(tmp_path, name, damage):
  _, _, path = exported(tmp_path)
  content = (path / name).read_bytes()
  match damage:
    case "missing":
      (path / name).unlink()
    case "cut":
      (path / name).write_bytes(content[: len(content) // 2])
    case "empty":
      (path / name).write_bytes(b"")
  with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
    folder.load_folder(path)


def test_no_folder_is_refused_with_the_way_out(tmp_path):
  for path in ("", str(tmp_path / "none")):
    with pytest.raises(WeightsUnavailable, match=r"set it to one with config\.json"):
      load_pretrained(WeightsConfig("huggingface", path), ModelConfig())


def test_a_contradicting_architecture_is_refused(tmp_path):
  _, _, path = exported(tmp_path)
  with pytest.raises(ValueError, match=r"model\.num_layers = 5, checkpoint has 2"):
    load_pretrained(WeightsConfig("huggingface", str(path)), ModelConfig(num_layers=5))


def test_a_dry_run_needs_no_weights():
  config = Config(weights=WeightsConfig("huggingface"), model=ModelConfig(num_layers=3))
  assert any("trained and" in line for line in preview(config))
