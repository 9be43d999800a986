"""Test products and norms, the type in which a matrix's gradient leaves its product, and sums of a table's rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers import SEGMENT_BLOCK, embed, matmul, rms_norm, segment_sum

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, 32), np.float32))
KERNEL = jnp.asarray(np.random.default_rng(1).standard_normal((32, 16), np.float32))
AXES = ("fsdp", "tensor")


def test_bfloat16_gradient_of_a_matrix_is_not_rounded_to_bfloat16():
    loss = lambda x, kernel: jnp.sum(jnp.sin(matmul(x, kernel, AXES).astype(jnp.float32)))
    dx, dkernel = jax.grad(loss, (0, 1))(jnp.asarray(X, jnp.bfloat16), KERNEL)
    assert dx.dtype == jnp.bfloat16 and dkernel.dtype == jnp.float32
    assert np.any(np.asarray(dkernel.astype(jnp.bfloat16).astype(jnp.float32)) != np.asarray(dkernel))


def test_a_table_s_gradient_is_a_float32_sum_of_its_tokens_rows():
    """In bfloat16 a sum of 1,024 ones would end at 256."""
    look_up = lambda table: embed(jnp.full(1024, 3), table, ("tensor", "fsdp"), jnp.dtype("bfloat16"))
    rows, backward = jax.vjp(look_up, jnp.ones((5, 8)))
    (gradient,) = backward(jnp.ones_like(rows))
    assert rows.dtype == jnp.bfloat16 and gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 1024.0 * (np.arange(5) == 3)[:, None] * np.ones((5, 8)))


def test_rms_norm_keeps_its_result_which_the_next_product_needs_too():
    into_a_product = lambda x, kernel: matmul(rms_norm(x), kernel, AXES)
    kept = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(into_a_product, X, KERNEL)[1])}
    assert sum(leaf.shape == X.shape for leaf in kept.values()) == 1


NUMBERS = {
    "one row": [3],
    "one number": [2] * (3 * SEGMENT_BLOCK + 5),
    "a number over whole blocks": [0] * 50 + [1] * (4 * SEGMENT_BLOCK) + [2] * 60,
    "each its own": range(2 * SEGMENT_BLOCK),
    "some outside": [0, 400, 2, 399, 400, 2**30],
    "as words come": np.random.default_rng(0).zipf(1.2, 2000).clip(max=401) - 1,
}


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_segment_sum_is_the_sum(numbers, dtype):
    number = np.random.default_rng(1).permutation(np.array(list(numbers), np.int32))
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((len(number), 6)), dtype)
    expected, inside = np.zeros((400, 6)), number < 400
    np.add.at(expected, number[inside], np.asarray(rows, np.float64)[inside])
    sums = jax.jit(segment_sum, static_argnums=2)(rows, number, 400)
    assert sums.dtype == jnp.float32
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-4)


def test_values_are_added_in_a_fixed_order():
    """Write only row numbers by index, each to its own place."""
    text = jax.jit(segment_sum, static_argnums=2).lower(jnp.zeros((300, 8)), jnp.zeros(300, jnp.int32), 50).as_text()
    scatters = [line for line in text.splitlines() if "stablehlo.scatter" in line]
    assert len(scatters) == 1 and "unique_indices = true" in scatters[0], scatters
