"""Test rotary positions as a TPU computes them; tests/reference.py turns pairs as complex numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from model import rotary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tpu_s_products_swap_and_sum_as_exactly(monkeypatch, dtype):
    """Run a TPU's method here: a permutation swaps halves, and ones sum over heads."""
    a, b = jnp.asarray(np.random.default_rng(4).standard_normal((2, 2, 5, 4, 16)), dtype)
    swapped = rotary._swap_halves(a)
    expected = np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64), axis=-1, keepdims=True)
    np.testing.assert_allclose(rotary._sums_over_heads(a, b), expected, atol=1e-5)
    monkeypatch.setattr(rotary, "platform", lambda: "tpu")
    np.testing.assert_array_equal(rotary._swap_halves(a), swapped)
    np.testing.assert_allclose(rotary._sums_over_heads(a, b), expected, atol=1e-5)
