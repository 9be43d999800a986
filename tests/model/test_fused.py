"""Compare the fused addition and norm, interpreted, with the plain expression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.fused import add_and_norm
from model.kernels import HAS_PALLAS, norm_kernel
from model.layers import rms_norm


@pytest.mark.medium
@pytest.mark.parametrize(("device", "shape"), [("tpu", (2, 67, 128)), ("gpu", (3, 7, 128))])
def test_values_and_gradients_are_the_plain_expressions(device, shape):
    """Neither a block of 128 rows nor one of 8 divides the rows."""
    if device == "gpu" and not HAS_PALLAS:
        pytest.skip("this JAX's Pallas for GPUs has other names")
    generator = np.random.default_rng(0)
    x, y, *gradients = (jnp.asarray(generator.standard_normal(shape), jnp.float32) for _ in range(4))

    @jax.jit
    def ours(x, y):
        results, backward = jax.vjp(lambda x, y: add_and_norm(x, y, device, True), x, y)
        return *results, *backward(tuple(gradients))

    results, backward = jax.vjp(lambda x, y: (x + y, rms_norm(x + y)), x, y)
    for mine, plain in zip(ours(x, y), (*results, *backward(tuple(gradients))), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-6, atol=1e-6)
    again, once = ours(x, y), ours(x, y)
    assert all(np.array_equal(a, b) for a, b in zip(again, once))


def test_where_it_runs():
    gpu = "gpu" if HAS_PALLAS else None
    assert [norm_kernel(name, 768) for name in ("tpu", "gpu", "cuda", "cpu")] == ["tpu", gpu, gpu, None]
    assert norm_kernel("tpu", 100) is None and norm_kernel("cuda", 100) is None
