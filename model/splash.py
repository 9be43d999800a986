"""JAX's splash attention kernel for TPU, called so that `jax.shard_map` takes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.layers import SAVED

LANES = 128  # of a TPU's vector unit: heads and blocks come in these
BLOCK = 512  # positions that a step of the kernel holds, where the row has so many


def fits(length: int, head_dim: int) -> bool:
    """Whether the kernel takes rows of this length."""
    return length % min(BLOCK, length) == 0 and length % LANES == 0 and head_dim % LANES == 0


def splash_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    window: int | None,
    interpret: bool = False,
) -> Float[Array, "batch length heads head_dim"]:
    """Causal attention of scaled queries, without the matrix of scores, forward or backward (arXiv:2205.14135).
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
    kernel = _kernel(q.shape[1], q.shape[3], window, interpret)
    attention = lambda q, k, v, ids: _rows_first(kernel(*map(_heads_first, (q, k, v)), ids))
    return _varying_as(q, _unchecked(attention)(q, k, v, segment_ids))


def _forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, interpret: bool
) -> tuple[Array, Any]:
    kernel = _kernel(q.shape[1], q.shape[3], window, interpret)

    def attention(q: Array, k: Array, v: Array, ids: Array | None) -> tuple[Array, Any]:
        y, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, ids), *map(_heads_first, (q, k, v)))
        return _rows_first(y), backward

    y, backward = _unchecked(attention)(q, k, v, segment_ids)
    return _varying_as(q, y), backward


def _backward(window: int | None, interpret: bool, backward: Any, dy: Array) -> tuple[Array | None, ...]:
    gradients = lambda backward, dy: [_rows_first(gradient) for gradient in backward(_heads_first(dy))]
    return *_varying_as(dy, _unchecked(gradients)(backward, dy)), None


_attention.defvjp(_forward, _backward)


def _heads_first(x: Array) -> Array:
    """[batch, length, heads..., head_dim] to [batch, heads..., length, head_dim], as the kernel reads it."""
    return jnp.moveaxis(x, 1, -2)


def _rows_first(x: Array) -> Array:
    """`_heads_first` undone."""
    return jnp.moveaxis(x, -2, 1)


def _unchecked(function: Callable) -> Callable:
    """`function` of this device's arrays, without jax.shard_map's check of the mesh axes that arrays vary over: the
    kernel's results do not state theirs. Over no further axes, so nothing is divided and nothing is sent."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def _varying_as(like: Array, tree: Any) -> Any:
    """The same arrays, marked as varying over the mesh axes that `like` varies over."""
    axes = lambda x: jax.typeof(x).manual_axis_type.varying
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes(like) - axes(x)), to="varying"), tree)


def _kernel(length: int, group: int, window: int | None, interpret: bool) -> Callable:
    """The kernel of all rows and key heads: of queries [batch, kv_heads, group, length, head_dim], keys and values
    [batch, kv_heads, length, head_dim], and segment ids [batch, length] or None."""
    # A twentieth of what a start imports, and wanted on TPUs alone.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block, shape = min(BLOCK, length), (length, length)
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window, 0), 0)
    sizes = library.BlockSizes(
        **{"block_q": block, "block_kv": block, "block_kv_compute": block, "block_q_dkv": block},
        # Whole rows of keys: of blocks, each would write a gradient of all queries, and these would be summed.
        **{"block_kv_dkv": length, "block_kv_dkv_compute": block, "use_fused_bwd_kernel": True},
    )
    of_one_key_head = library.make_splash_mqa(
        masks.MultiHeadMask([mask] * group),
        **{"block_sizes": sizes, "head_shards": 1, "q_seq_shards": 1, "interpret": interpret},
        residual_checkpoint_name=SAVED,
    )
    of_one_row = jax.vmap(of_one_key_head, (0, 0, 0, None))
    segments = lambda ids: None if ids is None else library.SegmentIds(ids, ids)
    return lambda q, k, v, ids: jax.vmap(of_one_row)(q, k, v, segments(ids))
