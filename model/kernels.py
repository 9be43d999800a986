"""Attention's kernels: the choice of one, and calls of the libraries' ones, which recompute scores backward."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.layers import SAVED
from model.parallel import varying_as
from options.schema import ModelConfig

Kernel = Literal["splash", "cudnn", "blocks", "plain"]
"""`splash` and `cudnn` are the libraries' of TPUs and GPUs. `blocks` and `plain` are in model/attention.py: products of
some queries at a time whose scores the backward pass recomputes, or products whose scores it keeps."""

LANES = 128  # lanes of a TPU's vector unit: splash attention's blocks are multiples
BLOCK = 512  # the most positions in one of its blocks of queries or keys
SHORTEST_FOR_CUDNN = 64  # positions; for fewer, a cache's prefill and scoring gain nothing
KEPT = 2048  # the longest rows whose scores a CPU keeps for the backward pass


def has_bfloat16(platform: str, capability: float) -> bool:
    """Return whether a device multiplies bfloat16. GPUs do from Ampere on."""
    return platform not in ("gpu", "cuda") or capability >= 8


def attention_kernel(
    platform: str, capability: float, dtype: str, length: int, head_dim: int, documents: bool
) -> Kernel:
    """Return the kernel for rows of `length` positions, with `documents` masked or not.
    `capability` is a GPU's compute capability. cuDNN has kernels for Ampere and later, and for head sizes above 128 for
    Hopper and later. It would need a document mask as a matrix [batch, 1, length, length], or packed sequences. Their
    statistics take a float per head and token for each document that a row may have.
    """
    if platform == "tpu":
        return "splash" if splash_block(length) and head_dim % 64 == 0 else "blocks"
    if platform in ("gpu", "cuda"):
        largest = 256 if capability >= 9 else 128 if capability >= 8 else 0
        fits = head_dim % 8 == 0 and head_dim <= largest and length >= SHORTEST_FOR_CUDNN
        halves = dtype in ("bfloat16", "float16")
        return "cudnn" if fits and halves and not documents else "blocks"
    return "plain" if length <= KEPT else "blocks"


def splash_block(length: int) -> int:
    """Return the largest block that divides a row, a multiple of LANES up to BLOCK; 0 if none does."""
    return next((size for size in range(BLOCK, 0, -LANES) if length % size == 0), 0)


def window_of(config: ModelConfig, layer: int) -> int | None:
    """Return how many positions back a block sees; None: all. The last block sees all."""
    letter = "L" if layer == config.depth - 1 else config.window_pattern[layer % len(config.window_pattern)]
    if letter == "S" and config.short_window == 0:
        raise ValueError("model.short_window is 0: see options.validation.resolved")
    return config.short_window if letter == "S" else None


def query_spans(length: int, window: int | None) -> list[tuple[slice, slice]]:
    """Return the chunks of queries (an eighth, at least 64) with the keys that they can see."""
    size, back = max(64, -(-length // 8)), length if window is None else window
    starts = range(0, length, size)
    return [(slice(i, min(i + size, length)), slice(max(0, i - back), min(i + size, length))) for i in starts]


def described(kernel: Kernel, length: int, head_dim: int) -> str:
    """Return a line that describes a kernel for rows of `length` positions and heads of `head_dim`."""
    return {
        "splash": f"splash attention, in blocks of {splash_block(length)} positions",
        "cudnn": "cuDNN's",
        "blocks": "plain JAX in linear memory; the platform's kernel does not support this type, document mask, rows "
        f"of {length} tokens or heads of {head_dim}",
        "plain": "plain JAX, in blocks of queries",
    }[kernel]


def cudnn_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    window: int | None,
    layer: int,
) -> Float[Array, "batch length heads head_dim"]:
    """Return causal attention by cuDNN.

    `jax.nn.dot_product_attention` would make the same call in every layer. With `--deterministic`, XLA sets
    cuDNN's deterministic flag for the first of equal backward calls only, and the program then fails in its first step:
    `IndexError: raw_hash_map<>::at` (openxla/xla, pull request 46500). The number of the layer makes the calls unequal,
    as the seed of a dropout of zero.
    """
    back = None if window is None else window + 1  # with the query's own position
    return cudnn.dot_product_attention(  # pyright: ignore[reportReturnType]
        q, k, v, scale=1.0, mask_type=cudnn.MaskType.CAUSAL, seed=layer, sliding_window_length=back
    )


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
    y: Array = _splash(grouped, k, v, segment_ids, window, interpret)
    return y.reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _splash(
    q: Float[Array, "batch length kv_heads group head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    window: int | None,
    interpret: bool,
) -> Float[Array, "batch length kv_heads group head_dim"]:
    kernel = _splash_kernel(q.shape, window, interpret)
    attention = lambda q, k, v, ids: _rows_first(kernel(*map(_heads_first, (q, k, v)), ids))
    return varying_as(q, unchecked(attention)(q, k, v, segment_ids))


def _splash_forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, interpret: bool
) -> tuple[Array, Any]:
    kernel = _splash_kernel(q.shape, window, interpret)

    def attention(q: Array, k: Array, v: Array, ids: Array | None) -> tuple[Array, Any]:
        y, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, ids), *map(_heads_first, (q, k, v)))
        return _rows_first(y), backward

    y, backward = unchecked(attention)(q, k, v, segment_ids)
    return varying_as(q, y), backward


def _splash_backward(window: int | None, interpret: bool, backward: Any, dy: Array) -> tuple[Array | None, ...]:
    gradients = lambda backward, dy: [_rows_first(gradient) for gradient in backward(_heads_first(dy))]
    return *varying_as(dy, unchecked(gradients)(backward, dy)), None


_splash.defvjp(_splash_forward, _splash_backward)


def _heads_first(x: Array) -> Array:
    """Return [batch, length, heads..., head_dim] as [batch, heads..., length, head_dim], the kernel's order."""
    return jnp.moveaxis(x, 1, -2)


def _rows_first(x: Array) -> Array:
    """Undo `_heads_first`."""
    return jnp.moveaxis(x, -2, 1)


def unchecked(function: Callable) -> Callable:
    """Return `function` of this device's arrays, without jax.shard_map's check of the mesh axes that arrays vary over,
    since the kernel's results do not state theirs. It adds no axes, so nothing is divided or sent."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)


def _splash_kernel(q_shape: tuple[int, ...], window: int | None, interpret: bool) -> Callable:
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
    """Return the library's `SplashAttentionKernel` for one key head and its `group` of query heads, in blocks of
    `splash_block`. Its mask infos list the blocks of scores that it computes."""
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
