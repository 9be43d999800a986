"""The TPU's kernel gives what XLA's attention gives: values and gradients, interpreted here. (That it compiles for real
TPUs: tests/program/test_collectives.py.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs.schema import MeshConfig
from model.attention import attend
from model.kernels import products, splash_backward, splash_block
from model.splash import of_one_key_head, splash_attention
from training.mesh import make_mesh


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kv_heads", "window", "documents", "length", "head_dim"),
    [
        (1, 64, True, 256, 128),
        (2, None, False, 256, 64),
        (1, None, True, 1280, 64),
        (1, 130, False, 2176, 128),
    ],
)
def test_values_and_gradients(kv_heads, window, documents, length, head_dim):
    """Rows of one block, of five, and of 17, whose gradients of queries a second kernel computes."""
    assert splash_backward(length, window, head_dim).fused == (length < 2176)
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


def needed(length, window, block):
    """Blocks of scores, of `block` by `block` positions, that hold one that the mask leaves: counted one by one."""
    first_key = lambda row: 0 if window is None else max(0, row - window)
    seen = [
        first_key(row * block) // block <= column <= row
        for row in range(length // block)
        for column in range(length // block)
    ]
    return sum(seen)


def executed(kernel):
    """Products with a block of `block_q` by `block_kv_compute` scores that the library's kernels run for a query head,
    forward and backward, by the blocks that their mask infos leave."""
    sizes = kernel.kwargs["block_sizes"]
    blocks = lambda info: int(np.count_nonzero(info.block_mask))
    forward = 2 * blocks(kernel.fwd_mask_info)
    backward = (5 if sizes.use_fused_bwd_kernel else 4) * blocks(kernel.dkv_mask_info)
    backward *= sizes.block_kv_dkv // sizes.block_kv_dkv_compute
    return forward, backward + (0 if sizes.use_fused_bwd_kernel else 3 * blocks(kernel.dq_mask_info))


@pytest.mark.parametrize(
    ("length", "window", "blocks"),
    [
        (2048, None, 10),
        (2048, 512, 7),
        (8192, 2048, 70),
        pytest.param(16384, 4096, 252, marks=pytest.mark.slow),
        pytest.param(32768, None, 2080, marks=pytest.mark.slow),
        pytest.param(32768, 8192, 952, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_run_few_more_products_than_the_mask_needs(length, window, blocks):
    """2 products forward and 5 backward for each block of 512 by 512 scores that holds one that is seen."""
    assert needed(length, window, 512) == blocks and splash_block(length) == 512
    forward, backward = executed(of_one_key_head(length, 1, window, 128, interpret=True))
    assert forward == 2 * blocks
    assert forward + backward <= 1.15 * 7 * blocks
    if length <= 8192:
        assert backward == 5 * blocks


@pytest.mark.parametrize(
    ("length", "window", "head_dim"),
    [
        (2048, 512, 128),
        (1280, None, 64),
        (2176, 130, 128),
        (384, 100, 128),
        pytest.param(16384, 4096, 256, marks=pytest.mark.slow),
        pytest.param(32768, 512, 128, marks=pytest.mark.slow),
    ],
)
def test_what_is_planned_is_what_the_kernels_run(length, window, head_dim):
    planned = products("splash", length, window, head_dim)
    kernel = of_one_key_head(length, 1, window, head_dim, interpret=True)
    assert [n * splash_block(length) ** 2 for n in executed(kernel)] == list(planned)
