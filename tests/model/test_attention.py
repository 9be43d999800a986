"""Attention against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import attend


def defined(q, k, v, seen):
    """softmax(q k / sqrt(head_dim)) v, a head and a query at a time, in float64."""
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                keys, values = k[b, : seen(i), h // group].astype(np.float64), v[b, : seen(i), h // group]
                shares = np.exp(keys @ q[b, i, h] / np.sqrt(head_dim))
                out[b, i, h] = shares / shares.sum() @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_and_cached(kv_heads):
    generator = np.random.default_rng(kv_heads)
    q = generator.standard_normal((2, 6, 4, 8), np.float32)
    k, v = generator.standard_normal((2, 2, 6, kv_heads, 8), np.float32)
    np.testing.assert_allclose(
        attend(*map(jnp.asarray, (q, k, v))), defined(q, k, v, lambda i: i + 1), rtol=1e-4, atol=1e-5
    )
    late = q[:, :2]  # two queries at positions 3 and 4 of a cache of 6
    cached = attend(*map(jnp.asarray, (late, k, v)), jnp.array([3, 4]))
    np.testing.assert_allclose(cached, defined(late, k, v, lambda i: i + 4), rtol=1e-4, atol=1e-5)
