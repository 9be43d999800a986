"""Test rotary positions."""

import jax.numpy as jnp
import numpy as np

from model import rotary
from model.rotary import rotary_angles, rotate


def turned(x, position):
    return np.asarray(rotate(jnp.asarray(x), rotary_angles(jnp.array([position]), x.shape[-1], 100_000.0)))


def test_products_depend_on_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16), np.float32)
    near = np.sum(turned(q, 5) * turned(k, 2))
    np.testing.assert_allclose(near, np.sum(turned(q, 905) * turned(k, 902)), rtol=1e-3)
    assert abs(near - np.sum(turned(q, 5) * turned(k, 3))) > 1e-3


def test_position_zero_and_norms_are_untouched():
    x = np.random.default_rng(1).standard_normal((1, 1, 3, 16), np.float32)
    np.testing.assert_array_equal(turned(x, 0), x)
    np.testing.assert_allclose(np.linalg.norm(turned(x, 77), axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_nanochats_direction():
    """Turn a pair (1, 0) to (cos, -sin): by minus the angle."""
    x = np.zeros((1, 1, 1, 2), np.float32)
    x[..., 0] = 1
    np.testing.assert_allclose(turned(x, 1)[0, 0, 0], [np.cos(1), -np.sin(1)], rtol=1e-6)


def test_a_product_with_a_permutation_swaps_as_exactly(monkeypatch):
    """Run a TPU's method here."""
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 5, 4, 16)), dtype)
        moved = rotary._swap_halves(x)
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "platform", lambda: "tpu")
            np.testing.assert_array_equal(rotary._swap_halves(x), moved)


def test_a_product_with_ones_sums_over_heads_as_exactly(monkeypatch):
    """Run a TPU's method here."""
    for dtype in (jnp.float32, jnp.bfloat16):
        a, b = jnp.asarray(np.random.default_rng(4).standard_normal((2, 2, 5, 4, 16)), dtype)
        expected = np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64), axis=-1, keepdims=True)
        np.testing.assert_allclose(rotary._sums_over_heads(a, b), expected, atol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr(rotary, "platform", lambda: "tpu")
            np.testing.assert_allclose(rotary._sums_over_heads(a, b), expected, atol=1e-5)
