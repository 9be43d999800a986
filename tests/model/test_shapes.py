"""Compare the analytic counts with the network's parameters, and with XLA's counts of the program."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs.schema import ModelConfig
from model.loss import loss_sums
from model.shapes import flops_per_token, parameter_counts
from tests.helpers import ALL_FEATURES, TINY
from tests.model.test_gpt import build
from training.optimizer import parameter_groups


def test_flops_per_token():
    """XLA also counts element-wise work, a few percent at these sizes. The length is one block of attention: with
    longer ones, it skips scores that the convention counts."""
    config = ModelConfig(depth=2, width=512, heads=8, kv_heads=2, head_dim=64, vocab_size=2048)
    model, params = build(config)
    rows = jnp.zeros((8, 64), jnp.int32)
    graphdef, _ = nnx.split(model)
    loss = lambda params: loss_sums(nnx.merge(graphdef, params), rows, rows, jnp.ones(rows.shape))[0]
    cost = jax.jit(jax.grad(loss)).lower(params).compile().cost_analysis()
    assert cost["flops"] / rows.size == pytest.approx(flops_per_token(config, 64), rel=0.04)
    assert cost["flops"] / rows.size > flops_per_token(config, 64) * 0.999


def test_parameter_counts():
    config = replace(TINY, **ALL_FEATURES)
    built = {}
    for group, leaf in zip(*(jax.tree.leaves(tree) for tree in (parameter_groups(config), build(config)[1]))):
        built[group] = built.get(group, 0) + leaf.size
    assert parameter_counts(config) == built
