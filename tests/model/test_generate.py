"""Test sampling with the cache."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.sampling import generate
from tests.helpers import TINY
from tests.model.test_gpt import build, networks

LENGTH = 16
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@partial(jax.jit, static_argnames=("prefill", "temperature", "top_k"))
def generated(graphdef, params, buffer, lengths, seeds, **options):
    return generate(nnx.merge(graphdef, params), buffer, lengths, seeds, **options)


@pytest.fixture(scope="module")
def network():
    model, _ = build()
    graphdef, params = nnx.split(model)
    return model, graphdef, nnx.to_pure_dict(params)


def sample(network, prompts=PROMPTS, seed=0, temperature=1.0, top_k=0):
    _, graphdef, params = network
    buffer = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prompt in zip(buffer, prompts):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    options = {"prefill": int(lengths.min()), "temperature": temperature, "top_k": top_k}
    seeds = np.arange(len(prompts), dtype=np.int32) + 1000 * seed
    return np.asarray(generated(graphdef, params, buffer, lengths, seeds, **options))


@pytest.mark.medium
@networks
def test_greedy_equals_the_full_pass_token_by_token(options):
    model, _ = build(replace(TINY, **options))
    graphdef, params = nnx.split(model)
    rows = sample((model, graphdef, nnx.to_pure_dict(params)), temperature=0.0)
    full_pass = jax.jit(lambda tokens: model(tokens)[0])
    for row, prompt in zip(rows, PROMPTS):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(prompt)] = prompt
        for position in range(len(prompt), LENGTH):
            tokens[0, position] = jnp.argmax(full_pass(tokens)[0, position - 1])
        assert row.tolist() == tokens[0].tolist()


def test_a_row_does_not_depend_on_other_rows(network):
    together = sample(network)
    assert sample(network, PROMPTS[:1])[0].tolist() == together[0].tolist()
    assert sample(network, [PROMPTS[0], [9]])[0].tolist() == together[0].tolist()


def test_seed_and_rows_vary_and_repeat(network):
    same = sample(network, [[1, 2]] * 4)
    assert len({tuple(row) for row in same}) == 4
    np.testing.assert_array_equal(same, sample(network, [[1, 2]] * 4))
    assert np.any(same != sample(network, [[1, 2]] * 4, seed=1))


def test_top_k(network):
    np.testing.assert_array_equal(sample(network, top_k=1), sample(network, temperature=0.0))
    first = sample(network, [[1, 2, 3]] * 64, top_k=4)[:, 3]
    logits, _ = network[0](jnp.array([[1, 2, 3]]))
    assert set(first.tolist()) <= set(np.argsort(logits[0, -1])[-4:].tolist()) and len(set(first.tolist())) > 1


def test_frequencies_follow_the_softmax(network):
    """Compare 1,000 draws of one token with the capped, tempered distribution by chi-square over its ten likeliest."""
    first = sample(network, [[1, 2, 3]] * 1000, temperature=0.5)[:, 3]
    logits = np.asarray(network[0](jnp.array([[1, 2, 3]]))[0][0, -1], np.float64)
    expected = np.exp(TINY.softcap * np.tanh(logits / TINY.softcap) / 0.5)
    expected *= 1000 / expected.sum()
    likeliest = np.argsort(expected)[-10:]
    counts = np.bincount(first, minlength=TINY.vocab_size)
    chi_square = np.sum((counts - expected)[likeliest] ** 2 / expected[likeliest])
    assert chi_square < 30  # 10 degrees of freedom: one in a thousand
