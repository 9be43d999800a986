"""Compare draws from logits with the distribution that the options define, and continuations with the full pass."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.sampling import Sampling, draw, generate
from tests.helpers import ALL_FEATURES, TINY
from tests.model.test_gpt import build

ROWS, VOCAB = 4000, 300
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)


def draws(temperature, top_k, top_p, seed=0):
    of_rows = (np.full(ROWS, x) for x in (np.float32(temperature), top_k, np.float32(top_p)))
    options = Sampling(*of_rows, np.arange(ROWS) + seed)
    return np.asarray(jax.jit(draw)(np.tile(LOGITS, (ROWS, 1)), jnp.full(ROWS, 5), options))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1, 0, 1), (0.5, 8, 1), (1, 0, 0.5), (2, 20, 0.7), (1, 1, 1), (1, 0, 1e-38)],
)
def test_frequencies_are_the_distribution_s(temperature, top_k, top_p):
    """Apply chi-square to the likeliest tokens. No excluded token may be drawn."""
    order = np.argsort(-LOGITS)
    shares = np.exp((LOGITS[order].astype(np.float64) - LOGITS.max()) / temperature)
    shares[top_k or VOCAB :] = 0
    shares /= shares.sum()
    shares[1:][np.cumsum(shares)[:-1] >= top_p] = 0
    shares /= shares.sum()
    tokens = draws(temperature, top_k, top_p)
    assert set(tokens.tolist()) <= set(order[shares > 0].tolist())
    counts = np.bincount(tokens, minlength=VOCAB)[order]
    likeliest = shares * ROWS >= 5
    chi_square = np.sum((counts - ROWS * shares)[likeliest] ** 2 / (ROWS * shares)[likeliest])
    freedom = likeliest.sum()
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 6


def test_rows_draw_by_their_own_options_and_seeds():
    mixed = np.array([[0, 1, 1, 1, 1, 1e-9, 1.2e-38], [0, 1, 0, 0, 0, 0, 0], [1, 1, 1e-6, 1, 1e-40, 1, 1]], np.float32)
    tokens = np.asarray(draw(jnp.tile(LOGITS, (7, 1)), jnp.full(7, 5), Sampling(*mixed, np.arange(7))))
    assert tokens[[0, 1, 2, 4, 5, 6]].tolist() == [LOGITS.argmax()] * 6
    assert tokens[3] == draws(1.0, 0, 1.0)[3]
    assert np.mean(draws(1.0, 0, 1.0) == draws(1.0, 0, 1.0, seed=ROWS)) < 0.2


LENGTH = 16
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@partial(jax.jit, static_argnames=("prefill", "temperature", "top_k"))
def generated(graphdef, params, buffer, lengths, seeds, **options):
    return generate(nnx.merge(graphdef, params), buffer, lengths, seeds, **options)


def network_with_all_features():
    model, _ = build(replace(TINY, **ALL_FEATURES))
    graphdef, params = nnx.split(model)
    return model, graphdef, nnx.to_pure_dict(params)


def sample(network, prompts=PROMPTS, temperature=1.0):
    _, graphdef, params = network
    buffer = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prompt in zip(buffer, prompts):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    options = {"prefill": int(lengths.min()), "temperature": temperature, "top_k": 0}
    seeds = np.arange(len(prompts), dtype=np.int32)
    return np.asarray(generated(graphdef, params, buffer, lengths, seeds, **options))


def test_greedy_equals_the_full_pass_token_by_token_and_rows_vary_by_their_seeds():
    network = network_with_all_features()
    rows, full_pass = sample(network, temperature=0.0), jax.jit(lambda tokens: network[0](tokens)[0])
    for row, prompt in zip(rows, PROMPTS):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(prompt)] = prompt
        for position in range(len(prompt), LENGTH):
            tokens[0, position] = jnp.argmax(full_pass(tokens)[0, position - 1])
        assert row.tolist() == tokens[0].tolist()
    assert len({tuple(row) for row in sample(network, [[1, 2]] * 4)}) == 4
