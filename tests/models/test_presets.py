"""Presets have the published numbers of parameters."""

import jax
import numpy as np
import pytest
from flax import nnx

from sao_jax.models import presets
from sao_jax.models.transformer import Transformer

PARAMETERS = {
  "smollm2_135m": 134_515_008,
  "qwen2_5_1_5b": 1_543_714_304,
  "qwen3_0_6b": 596_049_920,
  "qwen3_8b": 8_190_735_360,
  "qwen3_30b_a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
  config = getattr(presets, name)()
  model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  assert sum(int(np.prod(x.shape)) for x in leaves) == PARAMETERS[name]
