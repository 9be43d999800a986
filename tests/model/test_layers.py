"""Products and norms, and the type in which a matrix's gradient leaves its product."""

import jax
import jax.numpy as jnp
import numpy as np

from model.layers import matmul, rms_norm

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64, 32), np.float32))
KERNEL = jnp.asarray(np.random.default_rng(1).standard_normal((32, 16), np.float32))
AXES = ("fsdp", "tensor")


def gradients(x, kernel):
    return jax.grad(lambda x, k: jnp.sum(jnp.sin(matmul(x, k, AXES).astype(jnp.float32))), (0, 1))(x, kernel)


def test_matmul_is_the_product_and_has_its_gradients():
    np.testing.assert_allclose(matmul(X, KERNEL, AXES), X @ KERNEL, rtol=1e-5, atol=1e-5)
    expected = jax.grad(lambda x, k: jnp.sum(jnp.sin(x @ k)), (0, 1))(X, KERNEL)
    for ours, plain in zip(gradients(X, KERNEL), expected):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_bfloat16_gradient_of_a_matrix_is_not_rounded_to_bfloat16():
    dx, dkernel = gradients(jnp.asarray(X, jnp.bfloat16), jnp.asarray(KERNEL))
    assert dx.dtype == jnp.bfloat16 and dkernel.dtype == jnp.float32
    assert np.any(np.asarray(dkernel.astype(jnp.bfloat16).astype(jnp.float32)) != np.asarray(dkernel))


def test_the_product_itself_is_asked_for_float32():
    """In the program, the dot that makes the matrix's gradient has bfloat16 inputs and a float32 result."""
    text = str(jax.make_jaxpr(gradients)(jnp.asarray(X, jnp.bfloat16), jnp.asarray(KERNEL)))
    dots = [
        line for line in text.splitlines() if "f32[32,16] = dot_general" in line.replace(":", " ").replace("  ", " ")
    ]
    assert len(dots) == 1 and "preferred_element_type=float32" in text


def test_rms_norm():
    x = X * 3
    expected = x / np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, -1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(rms_norm(x), expected, rtol=1e-5)
    assert rms_norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.all(np.isfinite(rms_norm(jnp.zeros_like(x))))
