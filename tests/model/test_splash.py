"""The TPU's kernel gives what XLA's attention gives: values and gradients, interpreted here. (That it compiles for real
TPUs: tests/program/test_collectives.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import attend
from model.splash import fits, splash_attention


@pytest.mark.parametrize(
    ("kv_heads", "window", "documents", "length"),
    [(2, None, False, 256), (1, None, False, 256), (2, 100, False, 256), (1, 64, True, 128), (2, None, True, 256)],
)
def test_values_and_gradients(kv_heads, window, documents, length):
    generator = np.random.default_rng(0)
    random = lambda heads: jnp.asarray(generator.standard_normal((2, length, heads, 128)), jnp.float32)
    q, k, v, weights = random(2), random(kv_heads), random(kv_heads), random(2)
    segments = jnp.asarray(np.sort(generator.integers(0, 3, (2, length)), axis=1), jnp.int32) if documents else None

    def value(attention):
        return jax.value_and_grad(lambda q, k, v: jnp.sum(attention(q, k, v) * weights), (0, 1, 2))(q, k, v)

    ours, gradients = value(lambda q, k, v: splash_attention(q, k, v, segments, window, interpret=True))
    expected, theirs = value(lambda q, k, v: attend(q, k, v, segment_ids=segments, window=window))
    assert float(ours) == pytest.approx(float(expected), rel=1e-4)
    for a, b in zip(gradients, theirs):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_which_rows_fit():
    assert fits(2048, 128) and fits(256, 128) and fits(128, 256)
    assert not fits(2048, 64) and not fits(100, 128) and not fits(640, 128)
