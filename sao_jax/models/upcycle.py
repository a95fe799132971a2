"""Dense → mixture of experts, exactly, at the same size."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from sao_jax.config import ModelConfig


def upcycle(config: ModelConfig, params: nnx.State, experts: int) -> tuple[ModelConfig, nnx.State]:
  """Splits each dense FFN into ``experts`` slices of its hidden units, which become the experts.

  A SwiGLU FFN is a sum over hidden units, so over slices of them::

      FFN(x) = Σ_e down_e · (silu(gate_e x) ∘ up_e x) = Σ_e w_e · (E · down_e) · (…)

  with the router at zero and every expert chosen (top-k = E), each weight w_e is 1/E, which the
  factor E on ``w_down`` cancels.  The model computes what it did before (exactly, up to the order
  of summation), with the same number of parameters and FLOPs plus the router's; training is free to
  move the router.  Compare sparse upcycling (arXiv 2212.05055), which copies the FFN instead.

  Args:
    config: a dense model (``num_experts == 0``).
    params: its parameters, policy or critic.
    experts: E; must divide ``d_ff``.
  Returns:
    The MoE's configuration (``d_ff`` is now an expert's width) and parameters.  Leaves other than
    the FFN's are the same arrays as in ``params``.
  Raises:
    ValueError: the model is MoE already, or ``experts`` does not divide ``d_ff``.
  """
  if config.num_experts:
    raise ValueError(
      f"upcycling needs a dense model, but this one has {config.num_experts} experts; set "
      "weights.upcycle_experts = 0"
    )
  if experts < 1 or config.d_ff % experts:
    raise ValueError(
      f"weights.upcycle_experts = {experts} does not divide the FFN's width d_ff = {config.d_ff}"
    )
  flat = dict(nnx.to_flat_state(params))
  paths = {"/".join(str(part) for part in path): path for path in flat}
  at_gate_up, at_down = paths["layers/ffn/w_gate_up"], paths["layers/ffn/w_down"]
  gate_up, down = flat[at_gate_up], flat[at_down]
  layers, model, _ = gate_up.shape
  width = config.d_ff // experts
  # [L, D, gate|up, E, F/E] → [L, E, D, gate|up, F/E]
  slices = gate_up[...].reshape(layers, model, 2, experts, width).transpose(0, 3, 1, 2, 4)
  flat[at_gate_up] = gate_up.replace(slices.reshape(layers, experts, model, 2 * width))
  flat[at_down] = down.replace(down[...].reshape(layers, experts, width, model) * experts)
  router = jnp.zeros((layers, model, experts), gate_up.dtype)
  flat[(*at_gate_up[:-1], "router")] = gate_up.replace(router)
  moe = dataclasses.replace(config, d_ff=width, num_experts=experts, experts_per_token=experts)
  return moe, nnx.from_flat_state(flat)
