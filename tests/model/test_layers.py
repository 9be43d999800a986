"""Test products and norms, and the type in which a matrix's gradient leaves its product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers import embed, matmul, relu_squared, rms_norm

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, 32), np.float32))
KERNEL = jnp.asarray(np.random.default_rng(1).standard_normal((32, 16), np.float32))
AXES = ("fsdp", "tensor")


def gradients(x, kernel):
    return jax.grad(lambda x, k: jnp.sum(jnp.sin(matmul(x, k, AXES).astype(jnp.float32))), (0, 1))(x, kernel)


@pytest.mark.parametrize("cut", [(8, None), (None, 4), (8, 32)])
def test_a_product_from_and_to_heads_is_the_product(cut):
    heads = lambda a, head: a if head is None else a.reshape(*a.shape[:-1], -1, min(a.shape[-1], head))
    flat, backward = jax.vjp(lambda x, k: matmul(x, k, AXES), X, KERNEL)
    y, backward_of_heads = jax.vjp(lambda x, k: matmul(heads(x, cut[0]), k, AXES, cut), X, KERNEL)
    np.testing.assert_allclose(y, heads(flat, cut[1]), rtol=1e-5, atol=1e-5)
    for ours, plain in zip(backward_of_heads(jnp.sin(y)), backward(jnp.sin(flat))):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_bfloat16_gradient_of_a_matrix_is_not_rounded_to_bfloat16():
    dx, dkernel = gradients(jnp.asarray(X, jnp.bfloat16), jnp.asarray(KERNEL))
    assert dx.dtype == jnp.bfloat16 and dkernel.dtype == jnp.float32
    assert np.any(np.asarray(dkernel.astype(jnp.bfloat16).astype(jnp.float32)) != np.asarray(dkernel))


def test_a_table_s_gradient_is_a_float32_sum_of_its_tokens_rows():
    """In bfloat16 a sum of 1,024 ones would end at 256."""
    look_up = lambda table: embed(jnp.full(1024, 3), table, ("tensor", "fsdp"), jnp.dtype("bfloat16"))
    rows, backward = jax.vjp(look_up, jnp.ones((5, 8)))
    (gradient,) = backward(jnp.ones_like(rows))
    assert rows.dtype == jnp.bfloat16 and gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 1024.0 * (np.arange(5) == 3)[:, None] * np.ones((5, 8)))


def test_rms_norm():
    x = X * 3
    expected = x / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(rms_norm(x), expected, rtol=1e-5)
    assert rms_norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.all(np.isfinite(rms_norm(jnp.zeros_like(x))))


def kept(function, *arrays):
    """Return the bytes of floating-point arrays that `function` stores for its backward pass."""
    residuals = jax.tree.leaves(jax.vjp(function, *arrays)[1])
    return sum(leaf.nbytes for leaf in residuals)


def test_what_rms_norm_keeps():
    assert kept(rms_norm, X) == X.nbytes + X.nbytes // X.shape[-1]
    into_a_product = lambda x, kernel: matmul(rms_norm(x), kernel, AXES)
    shared = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(into_a_product, X, KERNEL)[1])}
    assert sum(leaf.shape == X.shape for leaf in shared.values()) == 1  # the product's input serves both


def test_relu_squared_s_gradient_in_bfloat16():
    x = jnp.linspace(-2, 2, 101).astype(jnp.bfloat16)
    dx = jax.vjp(relu_squared, x)[1](jnp.ones_like(x))[0]
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_allclose(dx.astype(jnp.float32), 2 * np.maximum(x.astype(jnp.float32), 0), rtol=2**-7)
