"""JAX's splash attention kernel for TPU, called so that `jax.shard_map` takes it."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.kernels import splash_block
from model.layers import SAVED
from model.parallel import varying_as


def splash_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    window: int | None,
    interpret: bool = False,
) -> Float[Array, "batch length heads head_dim"]:
    """Return causal attention of scaled queries, without the matrix of scores, forward or backward (arXiv:2205.14135).
    In shard_map, q, k and v vary over the same mesh axes.

    Each key head serves its group of query heads: nothing is repeated. Blocks that the mask leaves empty are skipped.
    `interpret` runs it anywhere, slowly.
    """
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    y: Array = _attention(grouped, k, v, segment_ids, window, interpret)
    return y.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: Float[Array, "batch length kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    window: int | None,
    interpret: bool,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    kernel = _kernel(q.shape, window, interpret)
    attention = lambda q, k, v, ids: _rows_first(kernel(*map(_heads_first, (q, k, v)), ids))
    return varying_as(q, _unchecked(attention)(q, k, v, segment_ids))


def _forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, interpret: bool
) -> tuple[Array, Any]:
    kernel = _kernel(q.shape, window, interpret)

    def attention(q: Array, k: Array, v: Array, ids: Array | None) -> tuple[Array, Any]:
        y, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, ids), *map(_heads_first, (q, k, v)))
        return _rows_first(y), backward

    y, backward = _unchecked(attention)(q, k, v, segment_ids)
    return varying_as(q, y), backward


def _backward(window: int | None, interpret: bool, backward: Any, dy: Array) -> tuple[Array | None, ...]:
    gradients = lambda backward, dy: [_rows_first(gradient) for gradient in backward(_heads_first(dy))]
    return *varying_as(dy, _unchecked(gradients)(backward, dy)), None


_attention.defvjp(_forward, _backward)


def _heads_first(x: Array) -> Array:
    """Return [batch, length, heads..., head_dim] as [batch, heads..., length, head_dim], the kernel's order."""
    return jnp.moveaxis(x, 1, -2)


def _rows_first(x: Array) -> Array:
    """Undo `_heads_first`."""
    return jnp.moveaxis(x, -2, 1)


def _unchecked(function: Callable) -> Callable:
    """Return `function` of this device's arrays, without jax.shard_map's check of the mesh axes that arrays vary over,
    since the kernel's results do not state theirs. It adds no axes, so nothing is divided or sent."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def _kernel(q_shape: tuple[int, ...], window: int | None, interpret: bool) -> Callable:
    """Return the kernel over all rows and key heads, for grouped queries of `q_shape`. It takes queries [batch,
    kv_heads, group, length, head_dim], keys and values [batch, kv_heads, length, head_dim], and segment ids [batch,
    length] or None."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    _, length, _, group, _ = q_shape
    of_one_row = jax.vmap(of_one_key_head(length, group, window, interpret), (0, 0, 0, None))
    segments = lambda ids: None if ids is None else SegmentIds(ids, ids)
    return lambda q, k, v, ids: jax.vmap(of_one_row)(q, k, v, segments(ids))


@cache  # at 32,768 positions the library takes 10 s
def of_one_key_head(length: int, group: int, window: int | None, interpret: bool) -> Any:
    """Return the library's `SplashAttentionKernel` for one key head and its `group` of query heads, in the blocks that
    `model.kernels` chooses. Its mask infos list the blocks of scores that it computes."""
    # A twentieth of the imports of a start, needed only on TPUs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block, shape = splash_block(length), (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window, 0), 0)
    # The library's fused backward kernel writes a gradient of all queries for each block of keys. XLA takes longer to
    # sum them than the second kernel takes (docs/performance.md).
    sizes = library.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    masks_of_group = masks.MultiHeadMask([mask] * group)
    with jax.ensure_compile_time_eval():  # not as part of the first caller's trace
        kernel = library.make_splash_mqa(
            masks_of_group,
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
            residual_checkpoint_name=SAVED,
        )
        return jax.tree.map(np.asarray, kernel)
