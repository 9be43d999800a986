"""Test the network against the float64 reference and by its own properties, and its counts against XLA's."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.gpt import GPT, flops_per_token, parameter_counts
from model.loss import loss_sums, softcap
from options.schema import ModelConfig
from tests import reference
from tests.helpers import ALL_FEATURES, FEATURES, TINY, perturbed
from training.optimizer import parameter_groups
from training.sharded import split_model

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 20), np.int32))


def build(config=TINY, dtype="float32"):
    """Return a network moved off its initial zeros, and its parameters."""
    model = GPT(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    params = perturbed(nnx.to_pure_dict(state))
    return nnx.merge(graphdef, params), params


NETWORKS = {"plain": {}, **FEATURES, "all": ALL_FEATURES}


@pytest.mark.parametrize("options", NETWORKS.values(), ids=NETWORKS)
def test_logits_equal_the_reference(options):
    config = replace(TINY, **options)
    model, params = build(config)
    logits, _ = model(TOKENS)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params)
        expected = reference.logits(wide, TOKENS, config)
        if options:
            assert not np.allclose(expected, reference.logits(wide, TOKENS, TINY), atol=1e-3)
    np.testing.assert_allclose(softcap(logits, TINY.softcap), expected, rtol=1e-4, atol=1e-5)


def test_the_initial_parameters_are_nanochats():
    """Compare with nanochat's init_weights: standard deviations of 0.8 (embedding), 0.001 (head), 1/sqrt(width)..."""
    width = 64
    config = replace(TINY, **ALL_FEATURES, width=width, vocab_size=4096)
    params = nnx.to_pure_dict(nnx.state(GPT(config, jnp.dtype("float32"), rngs=nnx.Rngs(0))))
    attention, mlp = params["blocks"][3]["attention"], params["blocks"][3]["mlp"]
    assert np.std(params["embed"]["table"]) == pytest.approx(0.8, rel=0.02)
    assert np.std(params["lm_head"]["kernel"]) == pytest.approx(0.001, rel=0.02)
    for name in ("query", "key", "value"):
        kernel = attention[name]["kernel"]
        assert np.std(kernel) == pytest.approx(width**-0.5, rel=0.05)
        assert np.abs(kernel).max() <= (3 / width) ** 0.5
    assert np.std(mlp["up"]["kernel"]) == pytest.approx(0.4 * width**-0.5, rel=0.05)
    assert not np.any(attention["out"]["kernel"]) and not np.any(mlp["down"]["kernel"])
    np.testing.assert_allclose(params["resid_lambdas"]["values"], [1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    np.testing.assert_allclose(params["x0_lambdas"]["values"], [0.2, 0.15, 0.1, 0.05], rtol=1e-6)
    assert params["smear_lambda"]["values"].tolist() == [0]
    assert params["backout_lambda"]["values"].tolist() == [np.float32(0.2)]
    assert np.std(attention["value_embedding"]["table"]) == pytest.approx(width**-0.5, rel=0.02)
    for gate in (attention["value_gate"]["kernel"], params["smear_gate"]["kernel"]):
        assert 0 <= np.min(gate) < 0.005 and 0.015 < np.max(gate) <= 0.02


def test_a_bound_smear_does_not_cross_documents():
    """With segment ids, a document's logits do not depend on the documents before it in its row."""
    model, _ = build(replace(TINY, **ALL_FEATURES))
    segments = jnp.broadcast_to(jnp.arange(20) >= 8, TOKENS.shape).astype(jnp.int32)
    changed = TOKENS.at[:, :8].set((TOKENS[:, :8] + 1) % TINY.vocab_size)
    before, after = (model(tokens, segment_ids=segments)[0] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, 8:], after[:, 8:])


def test_flops_per_token():
    """XLA also counts element-wise work, a few percent at these sizes. The length is one block of attention: with
    longer ones, it skips scores that the convention counts."""
    config = ModelConfig(depth=1, width=512, heads=8, kv_heads=2, head_dim=64, vocab_size=2048)
    graphdef, params = split_model(config, jnp.dtype("float32"))
    rows = jnp.zeros((8, 64), jnp.int32)
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
