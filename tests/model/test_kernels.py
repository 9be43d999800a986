"""Test which kernel attention takes, and compare the TPU's, interpreted, with XLA's attention: values and gradients.
(tests/tools/programs compile it for TPUs, on meshes.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import attend
from model.kernels import attention_kernel, of_one_key_head, splash_attention


@pytest.mark.parametrize(
    ("expected", "platform", "capability", "dtype", "length", "head_dim", "documents"),
    [
        ("splash", "tpu", 0.0, "bfloat16", 2048, 128, True),
        ("splash", "tpu", 0.0, "bfloat16", 1280, 64, True),
        ("blocks", "tpu", 0.0, "bfloat16", 1000, 128, False),
        ("blocks", "tpu", 0.0, "bfloat16", 2048, 72, False),
        ("cudnn", "gpu", 8.0, "bfloat16", 2047, 128, False),
        ("cudnn", "cuda", 9.0, "bfloat16", 2048, 256, False),
        ("blocks", "gpu", 8.9, "bfloat16", 2048, 256, False),
        ("blocks", "gpu", 9.0, "bfloat16", 2048, 100, False),
        ("blocks", "gpu", 9.0, "bfloat16", 2047, 128, True),
        ("blocks", "gpu", 9.0, "float32", 2048, 128, False),
        ("blocks", "gpu", 7.5, "float32", 2048, 128, False),
        ("plain", "cpu", 0.0, "float32", 2048, 64, True),
        ("blocks", "cpu", 0.0, "float32", 2049, 64, False),
    ],
)
def test_which_kernel(expected, platform, capability, dtype, length, head_dim, documents):
    assert attention_kernel(platform, capability, dtype, length, head_dim, documents) == expected


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kv_heads", "window", "documents", "length", "head_dim"),
    [(2, 64, True, 256, 128), (1, None, True, 1280, 64)],
)
def test_values_and_gradients(kv_heads, window, documents, length, head_dim):
    """Use rows of one block, and of five."""
    generator = np.random.default_rng(0)
    random = lambda heads: jnp.asarray(generator.standard_normal((1, length, heads, head_dim)), jnp.float32)
    q, k, v, weights = random(2) * head_dim**-0.5, random(kv_heads), random(kv_heads), random(2)
    segments = jnp.asarray(np.sort(generator.integers(0, 3, (1, length)), axis=1), jnp.int32) if documents else None

    def value(attention):
        return jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(attention(q, k, v) * weights), (0, 1, 2)))(q, k, v)

    ours, gradients = value(lambda q, k, v: splash_attention(q, k, v, segments, window, interpret=True))
    expected, theirs = value(lambda q, k, v: attend(q, k, v, segment_ids=segments, window=window))
    assert float(ours) == pytest.approx(float(expected), rel=1e-4, abs=1e-2)
    for a, b in zip(gradients, theirs):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "window", "blocks"),
    [(2048, None, 10), (2048, 512, 7), (1280, None, 15), (2176, 130, 48), (384, 100, 1)],
)
def test_each_kernel_visits_the_blocks_that_the_mask_needs(length, window, blocks):
    """Read the library's mask infos, forward, and backward for queries and keys. Rows of 2,048 are 4 blocks: 4 x 5 / 2
    are on and below the diagonal, and 4 + 3 within 512 positions."""
    kernel = of_one_key_head(length, 1, window, interpret=True)
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    assert [int(np.count_nonzero(info.block_mask)) for info in infos] == 3 * [blocks]
