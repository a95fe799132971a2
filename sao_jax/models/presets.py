"""Shapes of published models; each function returns a fresh ``ModelConfig``."""

from sao_jax.config import ModelConfig


def tiny() -> ModelConfig:
  """The default: two layers of four experts, for tests and the quickstart."""
  return ModelConfig()


def smollm2_135m() -> ModelConfig:
  """SmolLM2-135M: Llama form, tied embeddings.  134,515,008 parameters."""
  return ModelConfig(
    vocab_size=49152,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    d_ff=1536,
    num_experts=0,
    qk_norm=False,
    tie_embeddings=True,
    rope_theta=100_000.0,
    norm_eps=1e-5,
  )


def qwen2_5_1_5b() -> ModelConfig:
  """Qwen2.5-1.5B: bias on q, k, v; tied embeddings.  1,543,714,304 parameters."""
  return ModelConfig(
    vocab_size=151936,
    d_model=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    d_ff=8960,
    num_experts=0,
    qk_norm=False,
    qkv_bias=True,
    tie_embeddings=True,
    rope_theta=1_000_000.0,
    compute_dtype="bfloat16",
  )


def qwen3_0_6b() -> ModelConfig:
  """Qwen3-0.6B: q/k norm, tied embeddings.  596,049,920 parameters."""
  return ModelConfig(
    vocab_size=151936,
    d_model=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    d_ff=3072,
    num_experts=0,
    tie_embeddings=True,
    rope_theta=1_000_000.0,
    compute_dtype="bfloat16",
  )


def qwen3_8b() -> ModelConfig:
  """Qwen3-8B: q/k norm, own head.  8,190,735,360 parameters."""
  return ModelConfig(
    vocab_size=151936,
    d_model=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=12288,
    num_experts=0,
    rope_theta=1_000_000.0,
    compute_dtype="bfloat16",
    remat="full",
  )


def qwen3_30b_a3b() -> ModelConfig:
  """Qwen3-30B-A3B: 128 experts, 8 per token.  30,532,122,624 parameters, 3.3 billion active."""
  return ModelConfig(
    vocab_size=151936,
    d_model=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    d_ff=768,
    num_experts=128,
    experts_per_token=8,
    rope_theta=1_000_000.0,
    compute_dtype="bfloat16",
    remat="full",
  )
