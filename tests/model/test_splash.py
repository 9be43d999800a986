"""The TPU's kernel gives what XLA's attention gives: values and gradients, interpreted here. (That it compiles for real
TPUs: tests/program/test_collectives.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs.schema import MeshConfig
from model.attention import attend
from model.splash import fits, splash_attention
from training.mesh import make_mesh


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kv_heads", "window", "documents", "length"),
    [(2, None, False, 256), (1, None, False, 256), (2, 100, False, 256), (1, 64, True, 128), (2, None, True, 256)],
)
def test_values_and_gradients(kv_heads, window, documents, length):
    generator = np.random.default_rng(0)
    random = lambda heads: jnp.asarray(generator.standard_normal((2, length, heads, 128)), jnp.float32)
    q, k, v, weights = random(2) * 128**-0.5, random(kv_heads), random(kv_heads), random(2)
    segments = jnp.asarray(np.sort(generator.integers(0, 3, (2, length)), axis=1), jnp.int32) if documents else None

    def value(attention):
        return jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(attention(q, k, v) * weights), (0, 1, 2)))(q, k, v)

    ours, gradients = value(lambda q, k, v: splash_attention(q, k, v, segments, window, interpret=True))
    expected, theirs = value(lambda q, k, v: attend(q, k, v, segment_ids=segments, window=window))
    assert float(ours) == pytest.approx(float(expected), rel=1e-4)
    for a, b in zip(gradients, theirs):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_in_shard_map_its_results_vary_and_gradients_are_summed_where_they_must_be():
    """With jax.shard_map's checks on: rows over `data`, heads over `tensor`, and a matrix that is whole on every
    device, whose gradient is the sum over all of them; within a scan and jax.checkpoint, as blocks are."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    rows = PartitionSpec("data", None, "tensor")
    generator = np.random.default_rng(0)
    q, k, v = (jnp.asarray(generator.standard_normal((2, 128, 2, 128)), jnp.float32) for _ in range(3))
    segments = jnp.asarray(np.sort(generator.integers(0, 3, (2, 128)), axis=1), jnp.int32)
    matrix = jnp.asarray(generator.standard_normal((128, 128)) / 8 * 128**-0.5, jnp.float32)

    def loss(attention):
        def of_one_device(matrix, q, k, v, segments):
            block = jax.checkpoint(lambda q: attention(q @ matrix, k, v, segments))
            total = jax.lax.scan(lambda sum, _: (sum + jnp.sum(jnp.sin(block(q))), None), jnp.sum(0 * q), length=2)[0]
            return jax.lax.psum(total, ("data", "tensor"))

        specs = (PartitionSpec(), rows, rows, rows, PartitionSpec("data"))
        whole = jax.shard_map(of_one_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return jax.jit(jax.value_and_grad(whole, (0, 1, 2, 3)))(matrix, q, k, v, segments)

    ours, gradients = loss(lambda *arrays: splash_attention(*arrays, None, interpret=True))
    expected, theirs = loss(lambda q, k, v, segments: attend(q, k, v, segment_ids=segments))
    assert float(ours) == pytest.approx(float(expected), rel=1e-4)
    for a, b in zip(gradients, theirs):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_which_rows_fit():
    assert fits(2048, 128) and fits(256, 128) and fits(128, 256)
    assert not fits(2048, 64) and not fits(100, 128) and not fits(640, 128)
