"""The network: nanochat's plain GPT, against the float64 reference and by its own properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from model.flops import parameter_counts
from model.gpt import GPT
from model.loss import softcap
from tests import reference
from tests.helpers import TINY, perturbed
from training.optimizer import parameter_groups

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 20), np.int32))


def build(config=TINY, dtype="float32"):
    """A network off its initial zeros, and its parameters."""
    model = GPT(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    params = perturbed(nnx.to_pure_dict(state))
    return nnx.merge(graphdef, params), params


def test_logits_equal_the_reference():
    model, params = build()
    logits, _ = model(TOKENS)
    with jax.enable_x64(True):
        expected = reference.logits(jax.tree.map(lambda p: jnp.asarray(p, jnp.float64), params), TOKENS, TINY)
    np.testing.assert_allclose(softcap(logits, TINY.softcap), expected, rtol=1e-4, atol=1e-5)


def test_a_token_changes_no_earlier_logits():
    model, _ = build()
    changed = TOKENS.at[:, 12].set((TOKENS[:, 12] + 1) % TINY.vocab_size)
    before, after = model(TOKENS)[0], model(changed)[0]
    np.testing.assert_array_equal(before[:, :12], after[:, :12])
    assert not np.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [7, 1, 12]])
def test_the_cache_gives_the_full_pass(pieces):
    model, _ = build()
    cache, logits, start = model.empty_cache(3, 24), [], 0
    for size in pieces:
        piece, cache = model(TOKENS[:, start : start + size], cache, start)
        logits.append(piece)
        start += size
    np.testing.assert_allclose(jnp.concatenate(logits, axis=1), model(TOKENS)[0], rtol=1e-4, atol=1e-5)


def test_initial_parameters_are_nanochats():
    """Standard deviations as nanochat's init_weights: embedding 0.8, head 0.001, queries 1/sqrt(width), ..."""
    width = 64
    config = ModelConfig(depth=2, width=width, heads=4, kv_heads=4, head_dim=16, vocab_size=4096)
    params = nnx.to_pure_dict(nnx.state(GPT(config, jnp.dtype("float32"), rngs=nnx.Rngs(0))))
    block = params["blocks"][1]
    assert np.std(params["embed"]["table"]) == pytest.approx(0.8, rel=0.02)
    assert np.std(params["lm_head"]["kernel"]) == pytest.approx(0.001, rel=0.02)
    for name in ("query", "key", "value"):
        kernel = block["attention"][name]["kernel"]
        assert np.std(kernel) == pytest.approx(width**-0.5, rel=0.05)
        assert np.abs(kernel).max() <= (3 / width) ** 0.5
    assert np.std(block["mlp"]["up"]["kernel"]) == pytest.approx(0.4 * width**-0.5, rel=0.05)
    assert not np.any(block["attention"]["out"]["kernel"]) and not np.any(block["mlp"]["down"]["kernel"])


def test_activations_are_in_the_compute_type_and_close():
    exact, _ = build()
    model, _ = build(dtype="bfloat16")
    logits, _ = model(TOKENS)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(softcap(logits, 15.0), softcap(exact(TOKENS)[0], 15.0), atol=0.3)


def test_parameter_counts():
    _, params = build()
    groups = parameter_groups(params)
    built = dict.fromkeys(jax.tree.leaves(groups), 0)
    for group, leaf in zip(jax.tree.leaves(groups), jax.tree.leaves(params)):
        built[group] += leaf.size
    assert parameter_counts(TINY) == built
