"""The cache of keys and values that sampling writes and reads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.parallel import varying_as

READ = 64  # positions whose keys are read at a time


class LayerCache(NamedTuple):
    """Keys (rotated and normed) and values of earlier positions. Heads come before positions, in the order of the
    products: otherwise a CPU would copy the cache for each token."""

    keys: Float[Array, "batch kv_heads capacity head_dim"]
    values: Float[Array, "batch kv_heads capacity head_dim"]


def attend_to_cache(
    q: Float[Array, "batch length heads head_dim"],
    cache: LayerCache,
    positions: Int[Array, "batch length"],
    window: int | None,
) -> Float[Array, "batch length heads head_dim"]:
    """Return `attend(q, keys, values, positions, window=window)` for rows with their own positions. It reads only
    blocks of keys that some row sees, with the online softmax of arXiv:2205.14135. Other rows' blocks change no bit of
    a row. The result of a row beyond the capacity is arbitrary, but finite."""
    batch, length, _, head_dim = q.shape
    _, kv_heads, capacity, _ = cache.keys.shape
    size = min(READ, capacity)
    grouped = q.reshape(batch, length, kv_heads, -1, head_dim)
    far = jnp.where(positions < capacity, positions, 0)
    near = 0 if window is None else jnp.min(jnp.where(positions < capacity, positions, capacity)) - window
    lowest = jnp.float32(-1e30)  # finite: a block that a row does not see leaves its sums unchanged

    def add_block(i: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, y = sums
        start = jnp.minimum(i * size, capacity - size)
        keys, values = (jax.lax.dynamic_slice_in_dim(stored, start, size, axis=2) for stored in cache)
        places = start + jnp.arange(size)
        distance = positions[:, None, None, :, None] - places
        visible = (distance >= 0) & (distance <= (capacity if window is None else window)) & (places >= i * size)
        scores = jnp.einsum("btkgd,bksd->bkgts", grouped, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores, lowest)
        higher = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        shares, correction = jnp.exp(scores - higher[..., None]), jnp.exp(maximum - higher)
        new = jnp.einsum("bkgts,bksd->bkgtd", shares.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return higher, total * correction + jnp.sum(shares, axis=-1), y * correction[..., None] + new

    none = jnp.zeros((batch, kv_heads, grouped.shape[3], length), jnp.float32)
    sums = varying_as(q, (none + lowest, none, jnp.zeros((*none.shape, head_dim), jnp.float32)))
    last = jnp.max(far) // size
    _, total, y = jax.lax.fori_loop(jnp.minimum(jnp.maximum(near, 0) // size, last), last + 1, add_block, sums)
    return (y / total[..., None]).transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def write(
    cached: Float[Array, "batch kv_heads capacity head_dim"],
    new: Float[Array, "batch length kv_heads head_dim"],
    positions: Int[Array, "*rows length"] | None,
) -> Float[Array, "batch kv_heads capacity head_dim"]:
    """Return the cache with new keys or values: at its start, from the first position on, or at each row's own
    positions. Positions beyond the capacity are dropped."""
    if positions is not None and positions.ndim == 2:
        return cached.at[jnp.arange(len(cached))[:, None], :, positions].set(new, mode="drop")
    start = 0 if positions is None else positions[0]
    return jax.lax.dynamic_update_slice(cached, new.swapaxes(1, 2), (0, 0, start, 0))
