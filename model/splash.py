"""JAX's splash attention kernel for TPU, made fit for `jax.shard_map`."""

import importlib.util
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
from jaxtyping import Array, Float, Int

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
    """Causal attention, scaled by head_dim^-0.5, without the matrix of scores, forward or backward (arXiv:2205.14135).

    Each key head serves its group of query heads: nothing is repeated. Blocks that the mask leaves empty are skipped.
    `interpret` runs it anywhere, slowly.
    """
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[2]
    q = (q * head_dim**-0.5).reshape(batch, length, -1, group, head_dim)
    kernel = _kernel(length, group, window, interpret)
    segments = None if segment_ids is None else _library().SegmentIds(segment_ids, segment_ids)
    over_heads = jax.vmap(kernel, (0, 0, 0, None))
    y = jax.vmap(over_heads)(
        q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), segments
    )  # [batch, kv_heads, group, length, head_dim]
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def _kernel(length: int, group: int, window: int | None, interpret: bool) -> Any:
    """The kernel of one key head."""
    library, block = _library(), min(BLOCK, length)
    shape = (length, length)
    masks = library.mask_lib
    mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window, 0), 0)
    sizes = library.BlockSizes(
        **{"block_q": block, "block_kv": block, "block_kv_compute": block, "block_q_dkv": block},
        # Whole rows of keys: else each block of them would write queries' gradients of its own, to be summed.
        **{"block_kv_dkv": length, "block_kv_dkv_compute": block, "use_fused_bwd_kernel": True},
    )
    return library.make_splash_mqa(
        masks.MultiHeadMask([mask] * group), block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )


class _Varying(jax.ShapeDtypeStruct):
    """An array that differs from device to device along every axis that the program is written for one device of."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        axes = jax.sharding.get_abstract_mesh().manual_axes
        super().__init__(
            shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset(axes)) if axes else None
        )

    @staticmethod
    def like(array: Array) -> "_Varying":
        return _Varying(array.shape, array.dtype)


@cache
def _library() -> Any:
    """A copy of JAX's module whose results say along which axes they vary, which jax.shard_map asks for."""
    spec = importlib.util.find_spec("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.jax = SimpleNamespace(**vars(jax) | {"ShapeDtypeStruct": _Varying})
    return module
