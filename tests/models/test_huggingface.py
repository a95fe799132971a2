import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sao_jax.config import ModelConfig, WeightsConfig
from sao_jax.models import gguf, huggingface, presets, pretrained
from sao_jax.models.transformer import Transformer, hidden_states, init_params
from sao_jax.models.upcycle import upcycle
from tests.models import synthetic_gguf as synthetic

RECORDED = pathlib.Path(__file__).parent / "recorded" / "smollm2.json"
IDS = np.array([3, 30, 1, 7, 7, 21, 0, 39, 15, 2, 33])


def logits(config: ModelConfig, params: nnx.State, ids: np.ndarray) -> np.ndarray:
  graphdef = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0]

  @jax.jit
  def run(params, tokens):
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = hidden_states(model, tokens, positions, jnp.ones_like(tokens))
    return hidden @ (model.embed[...].T if config.tie_embeddings else model.head[...])

  return np.asarray(run(params, jnp.asarray(ids, jnp.int32)[None]))[0]


def flat(params: nnx.State) -> dict[str, np.ndarray]:
  return {
    "/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)
  }


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
  return synthetic.write(path, "llama", synthetic.tensors("llama"))


@pytest.mark.parametrize(
  ("arch", "options"),
  [
    ("llama", {}),
    ("llama", {"tied": False}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3moe", {"experts": 4, "tied": False}),
  ],
)
def test_gguf_computes_what_llama_cpp_computes(tmp_path, arch, options):
  path = synthetic.write(tmp_path / "x.gguf", arch, synthetic.tensors(arch, **options))
  config, params = huggingface.load_gguf(gguf.GGUFFile(path))
  assert config.tie_embeddings == options.get("tied", True)
  assert config.qkv_bias == (arch == "qwen2")
  assert config.qk_norm == arch.startswith("qwen3")
  assert config.head_dim == options.get("head_dim", 16)
  assert (config.norm_eps, config.rope_theta) == (1e-5, 500.0)
  expected = synthetic.forward(synthetic.read(path), arch, IDS)
  np.testing.assert_allclose(logits(config, params, IDS), expected, atol=2e-5)


def test_rotary_halves_of_one_head():
  pairs = np.array([0, 10, 1, 11, 2, 12], np.float32)
  assert huggingface.rotary_halves(pairs, 1).tolist() == [0, 1, 2, 10, 11, 12]


def test_tree_is_the_models_own(llama):
  config, params = huggingface.load_gguf(gguf.GGUFFile(llama), ModelConfig(head_chunk_mb=7))
  assert config.head_chunk_mb == 7
  _, fresh = init_params(config, 0)
  assert jax.tree.structure(params) == jax.tree.structure(fresh)
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, fresh)


def test_bfloat16_parameters(llama):
  _, params = huggingface.load_gguf(gguf.GGUFFile(llama), ModelConfig(param_dtype="bfloat16"))
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: t.pop("blk.1.ffn_up.weight"), r"missing tensors: blk\.1\.ffn_up\.weight"),
    (lambda t: t.pop("output_norm.weight"), r"missing tensors: output_norm\.weight"),
    (
      lambda t: t.update({"rope_freqs.weight": np.ones(8, np.float32)}),
      r"unknown tensors: rope_freqs\.weight",
    ),
    (
      lambda t: t.update({"blk.2.attn_norm.weight": np.ones(64, np.float32)}),
      r"unknown tensors: blk\.2\.attn_norm\.weight",
    ),
    (
      lambda t: t.update({"blk.1.attn_v.weight": np.ones((64, 64), np.float32)}),
      r"blk\.1\.attn_v\.weight has shape \(64, 64\), .* needs \(32, 64\)",
    ),
    (
      lambda t: t.update({"blk.0.ffn_gate.weight": np.ones((95, 64), np.float32)}),
      r"blk\.0\.ffn_gate\.weight has shape \(95, 64\), .* needs \(96, 64\)",
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
  arrays = synthetic.tensors("llama")
  change(arrays)
  file = gguf.GGUFFile(synthetic.write(tmp_path / "x.gguf", "llama", arrays))
  with pytest.raises(huggingface.CheckpointError, match=message):
    huggingface.load_gguf(file)


def test_tables_with_gaps_and_overlaps_are_refused(llama):
  file = gguf.GGUFFile(llama)
  config = gguf.model_config(file)
  table = list(huggingface.gguf_table(config, "llama"))
  twice = [*table, huggingface.Entry("layers/attention/wv", ("blk.{layer}.attn_k.weight",), True)]
  with pytest.raises(huggingface.CheckpointError, match=r"filled twice: .*wv; tensors used twice"):
    huggingface.params_from_tensors(config, file, twice)
  with pytest.raises(huggingface.CheckpointError, match=r"without an entry in the table: embed"):
    huggingface.params_from_tensors(config, file, table[1:])


@pytest.mark.parametrize(
  ("arch", "extra", "message"),
  [
    ("llama", {"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn'"),
    ("llama", {"llama.rope.scaling.factor": 4.0}, r"rope\.scaling\.factor = 4\.0"),
    ("llama", {"llama.final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0"),
    ("gemma2", {}, r"architecture 'gemma2' is not supported; known: llama, qwen2"),
  ],
)
def test_options_that_the_model_lacks_are_refused(tmp_path, arch, extra, message):
  path = synthetic.write(tmp_path / "x.gguf", arch, synthetic.tensors("llama"), extra=extra)
  with pytest.raises(ValueError, match=message):
    gguf.model_config(gguf.GGUFFile(path))


def test_tokenizer_of_a_file(llama, tmp_path):
  tokenizer = gguf.tokenizer(gguf.GGUFFile(llama))
  ids = {token: i for i, token in enumerate(synthetic.TOKENS)}

  def tokens(text: str) -> list[str]:
    return [synthetic.TOKENS[i] for i in tokenizer.encode(text).ids]

  assert tokens("abc + 12\n") == ["abc", "Ġ+", "Ġ", "1", "2", "Ċ"]
  assert tokens("ab<|im_start|>a<user>") == ["ab", "<|im_start|>", "a", "<user>"]
  assert tokenizer.decode([ids["<|im_start|>"], ids["ab"]]) == "ab"
  assert tokenizer.decode([ids["<user>"]]) == "<user>"
  assert tokenizer.get_vocab_size() == synthetic.VOCAB
  other = synthetic.write(tmp_path / "x.gguf", "llama", synthetic.tensors("llama"), pre="gpt-4o")
  with pytest.raises(ValueError, match="pre-tokenizer 'gpt-4o' is not one of smollm, qwen2"):
    gguf.tokenizer(gguf.GGUFFile(other))


@pytest.mark.parametrize("experts", [4, 3])
def test_upcycling_is_exact(llama, experts):
  config, params = huggingface.load_gguf(gguf.GGUFFile(llama))
  moe, split = upcycle(config, params, experts)
  assert (moe.num_experts, moe.experts_per_token, moe.d_ff) == (experts, experts, 96 // experts)
  before, after = flat(params), flat(split)
  assert after.pop("layers/ffn/router").shape == (2, 64, experts)
  assert sum(x.size for x in after.values()) == sum(x.size for x in before.values())
  _, fresh = init_params(moe, 0)
  assert jax.tree.structure(split) == jax.tree.structure(fresh)
  np.testing.assert_allclose(
    logits(moe, split, IDS), logits(config, params, IDS), atol=1e-5, rtol=0
  )


def test_upcycling_slices_hidden_units(llama):
  config, params = huggingface.load_gguf(gguf.GGUFFile(llama))
  _, split = upcycle(config, params, 4)
  before, after = flat(params), flat(split)
  gate_up, down = after["layers/ffn/w_gate_up"], after["layers/ffn/w_down"]
  dense = before["layers/ffn/w_gate_up"]
  np.testing.assert_array_equal(gate_up[1, 2, :, :24], dense[1, :, 48:72])  # gates 48 … 71
  np.testing.assert_array_equal(gate_up[1, 2, :, 24:], dense[1, :, 96 + 48 : 96 + 72])
  np.testing.assert_array_equal(down[0, 3], 4 * before["layers/ffn/w_down"][0, 72:])


def test_upcycling_refuses(llama):
  config, params = huggingface.load_gguf(gguf.GGUFFile(llama))
  with pytest.raises(ValueError, match=r"upcycle_experts = 5 does not divide .* d_ff = 96"):
    upcycle(config, params, 5)
  moe, split = upcycle(config, params, 2)
  with pytest.raises(ValueError, match="but this one has 2 experts"):
    upcycle(moe, split, 2)


def test_load_pretrained_from_a_file(llama):
  lines: list[str] = []
  weights = WeightsConfig(source="gguf", path=str(llama), upcycle_experts=2)
  config, params, tokenizer = pretrained.load_pretrained(
    weights, ModelConfig(moe_impl="dense"), lines.append
  )
  assert (config.moe_impl, config.num_experts, config.d_ff) == ("dense", 2, 48)
  assert flat(params)["layers/ffn/w_gate_up"].shape == (2, 2, 64, 96)
  assert tokenizer.get_vocab_size() == synthetic.VOCAB
  assert lines == [
    "weights: reading llama.gguf",
    "weights: each FFN split into 2 experts of width 48",
  ]


def test_load_pretrained_refuses_contradictions(llama):
  weights = WeightsConfig(source="gguf", path=str(llama))
  with pytest.raises(ValueError, match=r"model\.num_heads = 8, checkpoint has 4"):
    pretrained.load_pretrained(weights, ModelConfig(num_heads=8), lambda _: None)
  with pytest.raises(pretrained.WeightsUnavailable, match="is not a file"):
    pretrained.load_pretrained(WeightsConfig("gguf", "nowhere.gguf"), ModelConfig())
  with pytest.raises(ValueError, match="choose huggingface, smollm2 or gguf"):
    pretrained.load_pretrained(WeightsConfig("random"), ModelConfig())


@pytest.fixture(scope="module")
def smollm2() -> gguf.GGUFFile:
  try:
    return gguf.GGUFFile(pretrained.fetch_smollm2())
  except pretrained.WeightsUnavailable as reason:
    pytest.skip(str(reason))


@pytest.mark.slow
def test_smollm2_tokenizer_agrees_with_transformers(smollm2):
  tokenizer = gguf.tokenizer(smollm2)
  for text, ids in json.loads(RECORDED.read_text())["texts"]:
    assert tokenizer.encode(text).ids == ids, text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_logits_agree_with_transformers_dense_and_as_experts(smollm2):
  recorded = json.loads(RECORDED.read_text())
  config, params = huggingface.load_gguf(smollm2, ModelConfig(moe_impl="dense"))
  assert config == dataclasses.replace(
    presets.smollm2_135m(), moe_impl="dense", experts_per_token=config.experts_per_token
  )
  assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
  ids = np.array(recorded["prompt_ids"])
  dense = logits(config, params, ids)
  top = np.take_along_axis(dense, np.array(recorded["top_ids"]), -1)
  np.testing.assert_allclose(top, recorded["top_logits"], atol=1e-3)
  norm = np.logaddexp.reduce(dense.astype(np.float64), -1)
  np.testing.assert_allclose(norm, recorded["logsumexp"], atol=1e-3)
  moe = logits(*upcycle(config, params, 4), ids)
  assert np.abs(moe - dense).max() < 5e-4
