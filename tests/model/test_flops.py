"""Compare the analytic counts with XLA's counts of the program."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.schema import ModelConfig
from model.loss import loss_sums
from model.shapes import flops_per_token
from tests.model.test_gpt import build


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_flops_per_token(kv_heads):
    """XLA also counts element-wise work, a few percent at these sizes. The length is one block of attention: with
    longer ones, it skips scores that the convention counts."""
    config = ModelConfig(depth=2, width=512, heads=8, kv_heads=kv_heads, head_dim=64, vocab_size=2048)
    model, params = build(config)
    rows = jnp.zeros((8, 64), jnp.int32)
    graphdef, _ = nnx.split(model)
    loss = lambda params: loss_sums(nnx.merge(graphdef, params), rows, rows, jnp.ones(rows.shape))[0]
    cost = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()
    assert cost["flops"] / rows.size == pytest.approx(flops_per_token(config, 64), rel=0.04)
    assert cost["flops"] / rows.size > flops_per_token(config, 64) * 0.999
