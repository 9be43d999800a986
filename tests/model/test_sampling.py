"""Compare draws from logits with the distribution that the options define."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling import Sampling, draw

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
