"""Exported folders: every parameter comes back bit for bit, under the names that loaders know."""

import json
import logging
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from sao_jax.config import ChatConfig, ModelConfig
from sao_jax.data.chat import make_chat
from sao_jax.models import gguf, huggingface, safetensors
from sao_jax.models.export import architecture, export_policy
from sao_jax.models.transformer import init_params
from sao_jax.models.upcycle import upcycle
from tests.models import synthetic_gguf as synthetic
from tests.models.test_huggingface import IDS, logits

CHAT = make_chat(ChatConfig())
SIZES = {
  "vocab_size": 70,
  "d_model": 32,
  "num_layers": 2,
  "num_heads": 4,
  "num_kv_heads": 2,
  "head_dim": 16,
  "d_ff": 24,
  "num_experts": 0,
  "qk_norm": False,
}
VARIANTS = {
  "llama": {},
  "llama tied": {"tie_embeddings": True},
  "qwen2": {"qkv_bias": True, "tie_embeddings": True},
  "qwen3": {"qk_norm": True},
  "qwen3_moe": {"qk_norm": True, "num_experts": 4},
  "qwen3_moe bfloat16": {"qk_norm": True, "num_experts": 3, "param_dtype": "bfloat16"},
  "mixtral": {"num_experts": 4, "experts_per_token": 4},
  "mixtral tied": {"num_experts": 4, "tie_embeddings": True},
}


def model(**options):
  """(config, params) with no parameter at its neutral value, so that none can be mixed up."""
  config = ModelConfig(**(SIZES | options))
  _, params = init_params(config, 0)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noisy = [(x + jax.random.normal(k, x.shape)).astype(x.dtype) for k, x in zip(keys, leaves)]
  return config, jax.tree.unflatten(tree, noisy)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_exported_comes_back_bit_for_bit(tmp_path, variant):
  config, params = model(**VARIANTS[variant])
  folder = export_policy(tmp_path / "out", config, params, CHAT)
  file = safetensors.SafetensorsFile(folder / "model.safetensors")
  table = huggingface.huggingface_table(config)
  again = huggingface.params_from_tensors(config, file, table)
  assert jax.tree.structure(again) == jax.tree.structure(params)
  for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
    assert a.dtype == b.dtype == jnp.dtype(config.param_dtype)
    np.testing.assert_array_equal(a, b)
  assert json.loads((folder / "config.json").read_text())["model_type"] == variant.split()[0]


def test_names_and_orientation_of_a_mixture_of_experts():
  config, params = model(qk_norm=True, num_experts=4)
  tensors = huggingface.tensors_from_params(config, params, huggingface.huggingface_table(config))
  assert len(tensors) == 3 + 2 * (2 + 4 + 2 + 1 + 3 * 4)
  layers = params["layers"]
  attention, ffn = layers["attention"], layers["ffn"]
  block = "model.layers.1."
  for name, expected in {
    "lm_head.weight": params["head"][...].T,
    "model.embed_tokens.weight": params["embed"][...],
    block + "post_attention_layernorm.weight": layers["ffn_norm"][1],
    block + "self_attn.k_proj.weight": attention["wk"][1].T,
    block + "self_attn.q_norm.weight": attention["q_norm"][1],
    block + "mlp.gate.weight": ffn["router"][1].T,
    block + "mlp.experts.3.gate_proj.weight": ffn["w_gate_up"][1, 3, :, :24].T,
    block + "mlp.experts.3.up_proj.weight": ffn["w_gate_up"][1, 3, :, 24:].T,
    block + "mlp.experts.3.down_proj.weight": ffn["w_down"][1, 3].T,
  }.items():
    np.testing.assert_array_equal(tensors[name], expected, err_msg=name)
  assert tensors[block + "self_attn.k_proj.weight"].shape == (2 * 16, 32)  # [out, in]


def test_an_upcycled_llama_is_a_mixtral():
  config, params = upcycle(*model(), 4)
  tensors = huggingface.tensors_from_params(config, params, huggingface.huggingface_table(config))
  experts = "model.layers.0.block_sparse_moe.experts.2."
  gate_up = params["layers"]["ffn"]["w_gate_up"][0, 2]
  np.testing.assert_array_equal(tensors[experts + "w1.weight"], gate_up[:, :6].T)
  np.testing.assert_array_equal(tensors[experts + "w3.weight"], gate_up[:, 6:].T)
  assert tensors[experts + "w2.weight"].shape == (32, 6)


def test_gguf_names_go_both_ways_too(tmp_path):
  """llama.cpp's order of rotary rows included; so a GGUF file becomes a folder of the same model."""
  path = synthetic.write(tmp_path / "x.gguf", "llama", synthetic.tensors("llama"))
  file = gguf.GGUFFile(path)
  config, params = huggingface.load_gguf(file)
  back = huggingface.tensors_from_params(config, params, huggingface.gguf_table(config, "llama"))
  assert set(back) == set(file)
  for name, tensor in back.items():
    np.testing.assert_array_equal(tensor, file[name], err_msg=name)
  table = huggingface.huggingface_table(config)
  tensors = huggingface.tensors_from_params(config, params, table)
  again = huggingface.params_from_tensors(config, tensors, table)
  np.testing.assert_array_equal(logits(config, again, IDS), logits(config, params, IDS))


def test_architecture_file():
  config = ModelConfig(**(SIZES | {"num_experts": 4, "experts_per_token": 3, "qk_norm": True}))
  written = architecture(config, CHAT, 128)
  expected = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
    "pad_token_id": 0,
  }
  assert {name: written[name] for name in expected} == expected
  dense = architecture(ModelConfig(**SIZES), CHAT, 128)
  assert dense["architectures"] == ["LlamaForCausalLM"]
  assert not any("expert" in name or "moe" in name for name in dense)
  mixtral = architecture(ModelConfig(**(SIZES | {"num_experts": 4})), CHAT, 128)
  assert (mixtral["num_local_experts"], mixtral["intermediate_size"]) == (4, 24)


def test_tokenizer_of_the_folder_speaks_as_the_chat_did(tmp_path):
  config, params = model()
  folder = export_policy(tmp_path / "a" / "out", config, params, CHAT, max_positions=48)
  loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  text = "12+3*4=<python>12+3*4</python><output>24</output><answer>24</answer><eos>"
  ids = CHAT.encode_prompt([{"role": "user", "content": "12+3*4"}])
  ids += CHAT.encode_reply("<python>12+3*4</python>")
  ids += CHAT.encode_observation([{"role": "tool", "content": "24"}])
  ids += CHAT.encode_reply("<answer>24</answer>")
  assert loaded.encode(text).ids == ids
  assert loaded.decode(ids, skip_special_tokens=False) == text
  special = json.loads((folder / "tokenizer_config.json").read_text())
  assert (special["eos_token"], special["pad_token"]) == ("<eos>", "<pad>")
  assert special["model_max_length"] == 48
  assert "chat_template" not in special
  generation = json.loads((folder / "generation_config.json").read_text())
  assert generation == {"eos_token_id": list(CHAT.stop_ids), "pad_token_id": CHAT.pad_id}
  assert sorted(path.name for path in folder.parent.iterdir()) == ["out"]  # nothing left over


def test_a_newline_that_ends_replies_stays_text(tmp_path):
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"\n": 0, "a": 1}, unk_token="a"))
  plain = make_chat(ChatConfig(format="plain"), tokenizer)
  folder = export_policy(tmp_path / "out", *model(), plain, chat_template="{{ messages }}")
  written = json.loads((folder / "tokenizer_config.json").read_text())
  assert "eos_token" not in written
  assert written["chat_template"] == "{{ messages }}"
  assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"qkv_bias": True, "qk_norm": True}, r"qkv_bias and model\.qk_norm must not both be True"),
    ({"qkv_bias": True, "num_experts": 4}, r"qkv_bias = True with model\.num_experts = 4"),
    ({"vocab_size": 60}, r"the tokenizer has 64 ids, but the model has model\.vocab_size = 60"),
  ],
)
def test_what_no_architecture_computes_is_refused(tmp_path, options, message):
  with pytest.raises(huggingface.CheckpointError, match=message):
    export_policy(tmp_path / "out", *model(**options), CHAT)
  assert list(tmp_path.iterdir()) == []


def test_other_parameters_than_the_policys_are_refused(tmp_path):
  config = ModelConfig(**SIZES)
  _, critic = init_params(config, 0, "critic")
  with pytest.raises(
    huggingface.CheckpointError, match=r"head, value_head/bias, value_head/kernel"
  ):
    export_policy(tmp_path / "out", config, critic, CHAT)


def test_a_folder_in_use_is_left_alone_and_an_empty_one_is_filled(tmp_path):
  config, params = model()
  (tmp_path / "used").mkdir()
  (tmp_path / "used" / "mine.txt").write_text("mine")
  with pytest.raises(FileExistsError, match="used is not an empty folder"):
    export_policy(tmp_path / "used", config, params, CHAT)
  assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]
  (tmp_path / "empty").mkdir()
  export_policy(tmp_path / "empty", config, params, CHAT)
  assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_failure_while_writing_leaves_nothing(tmp_path):
  config, params = model()
  whole_numbers = jax.tree.map(lambda x: x.astype(jnp.int32), params)
  with pytest.raises(ValueError, match="has dtype int32; known: float32"):
    export_policy(tmp_path / "out", config, whole_numbers, CHAT)
  assert list(tmp_path.iterdir()) == []


def test_transformers_habit_with_qwen2_is_told(tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    export_policy(tmp_path / "out", *model(qkv_bias=True), CHAT)
  assert "PreTrainedTokenizerFast" in caplog.text


def test_safetensors_by_the_byte(tmp_path):
  path = tmp_path / "x.safetensors"
  safetensors.write(path, {"a": np.array([[1, 2], [3, 4]], np.float32).T})
  data = path.read_bytes()
  (length,) = struct.unpack("<Q", data[:8])
  assert length % 8 == 0
  assert json.loads(data[8 : 8 + length]) == {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
  }
  assert data[8 + length :] == struct.pack("<4f", 1, 3, 2, 4)
  path.write_bytes(data[:-1])
  with pytest.raises(ValueError, match=rf"has {len(data) - 1} bytes, .* describes {len(data)}"):
    safetensors.SafetensorsFile(path)
  header = json.dumps({"b": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}).encode()
  path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
  with pytest.raises(ValueError, match="b has dtype I8; known: F32, F16, BF16"):
    safetensors.SafetensorsFile(path)["b"]
