"""Causal attention with grouped-query heads, rotary positions and QK-norm, and the cache that sampling reads."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from model.cache import LayerCache, attend_to_cache, write
from model.kernels import attention_kernel, cudnn_attention, query_spans, splash_attention, window_of
from model.layers import Embedding, Linear, matmul, saved, symmetric_uniform
from model.parallel import (
    all_gather_shared_head,
    compute_capability,
    own_heads,
    platform,
    psum_over_tensor,
    vary_over_tensor,
    varying_as,
)
from model.rotary import Angles, rotate_and_norm
from options.schema import ModelConfig

# The most scores in memory at a time, if the backward pass recomputes them: of this many rows and queries.
ROWS = 2
QUERIES = 256


class Inputs(NamedTuple):
    """Inputs of every block other than the residual stream."""

    tokens: Int[Array, "batch length"]
    positions: Int[Array, "*rows length"] | None
    """Positions, of all rows or of each. None if nothing came before: without a cache, or to fill one."""
    angles: Angles
    segment_ids: Int[Array, "batch length"] | None
    dropout_keys: Key[Array, "batch"] | None = None
    """A random key for each row. None: no dropout."""


class Places(NamedTuple):
    """Positions in a row, and the segments there."""

    positions: Int[Array, "length"]
    segment_ids: Int[Array, "batch length"] | None

    def of(self, part: slice) -> "Places":
        return Places(self.positions[part], None if self.segment_ids is None else self.segment_ids[:, part])

    def see(self, keys: "Places", window: int | None) -> Bool[Array, "#batch 1 length keys"]:
        """Return the mask of keys that the queries at these places see."""
        distance = self.positions[:, None] - keys.positions
        visible = distance >= 0 if window is None else (distance >= 0) & (distance <= window)
        if self.segment_ids is None or keys.segment_ids is None:
            return visible[None, None]
        return (visible & (self.segment_ids[:, :, None] == keys.segment_ids[:, None]))[:, None]


def attend(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    positions: Int[Array, "length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    window: int | None = None,
    layer: int = 0,
) -> Float[Array, "batch length heads head_dim"]:
    """Return softmax attention of scaled queries. It is causal, or with `positions` of the queries attends to all keys
    up to them. With `segment_ids` it stays within a segment; with `window`, within this many positions back. `layer`
    never changes the result (`cudnn_attention`).

    `model.kernels.attention_kernel` chooses the kernel. A cache is read by plain products.
    """
    if positions is not None:
        cached = Places(jnp.arange(k.shape[1]), None)
        return plain_attention(q, k, v, Places(positions, None).see(cached, window))
    length, documents = q.shape[1], segment_ids is not None
    kernel = attention_kernel(platform(), compute_capability(), q.dtype.name, length, q.shape[3], documents)
    if kernel == "splash":
        return splash_attention(q, k, v, segment_ids, window)
    if kernel == "cudnn":
        return cudnn_attention(q, k, v, window, layer)
    places = Places(jnp.arange(length), segment_ids)
    if kernel == "blocks":
        size = math.gcd(q.shape[0], ROWS)
        groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (q, k, v, segment_ids))
        of_group = lambda group: attention_in_blocks(*group[:3], places._replace(segment_ids=group[3]), window)
        return jax.lax.map(of_group, groups).reshape(q.shape)
    return jnp.concatenate(
        [
            plain_attention(q[:, rows], k[:, keys], v[:, keys], places.of(rows).see(places.of(keys), window))
            for rows, keys in query_spans(length, window)
        ],
        axis=1,
    )


@jax.custom_vjp
def plain_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    visible: Bool[Array, "#batch 1 length keys"],
) -> Float[Array, "batch length heads head_dim"]:
    """Return `softmax(q k) v` over the keys `visible`, at least one for each query. It passes over the matrix of scores
    few times: rows are divided by their sums after the product with v, and one matrix is kept. As in model/layers.py,
    `_plain_forward` is the plain expression."""
    return _plain_forward(q, k, v, visible)[0]


def _plain_forward(q: Array, k: Array, v: Array, visible: Array) -> tuple[Array, tuple[Array, ...]]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    shares = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    sums = jnp.sum(shares, axis=-1).transpose(0, 3, 1, 2)[..., None]  # [batch, length, kv_heads, group, 1]
    shares = shares.astype(v.dtype)
    y = (jnp.einsum("bkgts,bskd->btkgd", shares, v, preferred_element_type=jnp.float32) / sums).astype(v.dtype)
    y = saved(y.reshape(q.shape))
    return y, (grouped, k, v, shares, sums, y)


def _plain_backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, None]:
    dq, dk, dv = _plain_gradients(residuals, dy)
    return dq, dk.astype(dq.dtype), dv.astype(dq.dtype), None


def _plain_gradients(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of q, and in float32 of k and v."""
    q, k, v, shares, sums, y = residuals
    dy = dy.reshape(grouped_shape := q.shape) / sums
    along = jnp.sum(dy * y.reshape(grouped_shape).astype(jnp.float32), axis=-1).transpose(0, 2, 3, 1)[..., None]
    dy = dy.astype(v.dtype)
    dv = jnp.einsum("bkgts,btkgd->bskd", shares, dy, preferred_element_type=jnp.float32)
    dshares = jnp.einsum("btkgd,bskd->bkgts", dy, v, preferred_element_type=jnp.float32)
    dscores = (shares * (dshares - along)).astype(v.dtype)
    dq = jnp.einsum("bkgts,bskd->btkgd", dscores, k)
    dk = jnp.einsum("bkgts,btkgd->bskd", dscores, q, preferred_element_type=jnp.float32)
    return dq.reshape(*q.shape[:2], -1, q.shape[-1]), dk, dv


plain_attention.defvjp(_plain_forward, _plain_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention_in_blocks(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    places: Places,
    window: int | None,
) -> Float[Array, "batch length heads head_dim"]:
    """Return `plain_attention(q, k, v, places.see(places, window))`, in memory linear in the length. Scores of QUERIES
    queries exist at a time, and the backward pass recomputes them. It sums gradients of keys and values in float32."""
    return _blocks_forward(q, k, v, places, window)[0]


def _blocks_forward(q: Array, k: Array, v: Array, places: Places, window: int | None) -> tuple[Array, tuple]:
    q, positions = jax.lax.optimization_barrier((q, places.positions))
    inside = places._replace(positions=positions)  # otherwise XLA keeps the masks of all blocks, for all groups of rows

    def of_span(rows: slice, keys: slice) -> Array:
        def of_block(block: tuple[Array, Places]) -> Array:
            q, here = block
            return plain_attention(q, k[:, keys], v[:, keys], here.see(inside.of(keys), window))

        return _rows(jax.lax.map(of_block, (_blocks(q[:, rows]), _blocks_of(inside.of(rows)))), rows)

    y = saved(jnp.concatenate([of_span(*span) for span in query_spans(q.shape[1], window)], axis=1))
    return y, (q, k, v, places, y)


def _blocks_backward(window: int | None, residuals: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, places, y = residuals
    dy, positions = jax.lax.optimization_barrier((dy, places.positions))
    inside = places._replace(positions=positions)

    def of_span(rows: slice, keys: slice) -> tuple[Array, tuple[Array, Array]]:
        def of_block(sums: tuple[Array, Array], block: tuple) -> tuple[tuple[Array, Array], Array]:
            q, y, dy, here = block
            _, again = _plain_forward(q, k[:, keys], v[:, keys], here.see(inside.of(keys), window))
            dq, dk, dv = _plain_gradients((*again[:-1], y), dy)
            return (sums[0] + dk, sums[1] + dv), dq

        zeros = varying_as(dy, jnp.zeros(k[:, keys].shape, jnp.float32))
        blocks = (*(_blocks(x[:, rows]) for x in (q, y, dy)), _blocks_of(inside.of(rows)))
        sums, dq = jax.lax.scan(of_block, (zeros, zeros), blocks)
        return _rows(dq, rows), sums

    dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dq = []
    for rows, keys in query_spans(q.shape[1], window):
        part, sums = of_span(rows, keys)
        dq.append(part)
        dk, dv = (total.at[:, keys].add(part) for total, part in zip((dk, dv), sums))
    return jnp.concatenate(dq, axis=1), dk.astype(k.dtype), dv.astype(v.dtype), None


attention_in_blocks.defvjp(_blocks_forward, _blocks_backward)


def _blocks(x: Array, axis: int = 1, mode: str = "constant") -> Array:
    """Return the positions in blocks of at most QUERIES, as even as can be: [batch, length, ...] to [blocks, batch,
    block, ...]. `mode` is `jnp.pad`'s for the last block: zeros, or the last position (`edge`)."""
    blocks = max(2, -(-x.shape[axis] // QUERIES))  # XLA would inline a loop of one, and keep the scores of several
    size = -(-x.shape[axis] // blocks)
    x = jnp.pad(x, [(0, blocks * size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :]), axis, 0)


def _blocks_of(places: Places) -> Places:
    """Return the places of `_blocks`. Each sees a key, padding included."""
    ids = None if places.segment_ids is None else _blocks(places.segment_ids, mode="edge")
    return Places(_blocks(places.positions, 0, "edge"), ids)


def _rows(blocks: Array, rows: slice) -> Array:
    """Undo `_blocks`."""
    x = jnp.moveaxis(blocks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : rows.stop - rows.start]


def has_value_embedding(config: ModelConfig, layer: int) -> bool:
    """Return whether a block has value embeddings: with the defaults every other one, the last included."""
    return config.value_embeddings and (config.depth - 1 - layer) % config.value_embedding_every == 0


class Attention(nnx.Module):
    """One attention sub-layer, of block number `layer`."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs | None):
        self.head_dim, self.kv_heads, self.qk_scale = config.head_dim, config.kv_heads, config.qk_scale
        self.layer, self.window = layer, window_of(config, layer)
        # As nanochat: uniform of the same standard deviation as a normal of 1/sqrt(width), to avoid outliers.
        uniform = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        matrix = partial(Linear, group="matrices", rngs=rngs)
        to_heads = partial(matrix, axes=("fsdp", "tensor"), cut=(None, self.head_dim))
        self.query = to_heads((config.width, queries), uniform)
        self.key = to_heads((config.width, keys), uniform)
        self.value = to_heads((config.width, keys), uniform)
        zeros = nnx.initializers.zeros
        self.out = matrix((queries, config.width), zeros, axes=("tensor", "fsdp"), cut=(self.head_dim, None))
        if has_value_embedding(config, layer):
            self.gate_limit = config.value_gate_limit
            bound = (3 / config.width) ** 0.5  # as the value matrix
            table, gate = symmetric_uniform(bound), nnx.initializers.uniform(0.02)
            axes = ("fsdp", "tensor")
            self.value_embedding = Embedding(config.vocab_size, keys, table, axes=axes, group="value_embeds", rngs=rngs)
            self.value_gate = matrix((config.value_gate_channels, config.kv_heads), gate, axes=(None, None))

    def __call__(
        self, x: Float[Array, "batch length width"], inputs: Inputs, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch length width"], LayerCache | None]:
        tokens, positions, angles, segment_ids, _ = inputs
        x = vary_over_tensor(x)
        # The queries carry the scale of attention's scores: applied later, it would round them twice.
        # For this device's heads along `tensor`. If devices share a key head, each computes a part of it.
        q: Array = rotate_and_norm(self.query(x), angles, self.qk_scale * self.head_dim**-0.5)
        k: Array = rotate_and_norm(all_gather_shared_head(self.key(x), self.kv_heads), angles, self.qk_scale)
        v: Array = self.value(x)
        if hasattr(self, "value_embedding"):
            first, count = own_heads(self.kv_heads)
            kernel = jax.lax.dynamic_slice_in_dim(vary_over_tensor(self.value_gate.kernel[...]), first, count, axis=1)
            gate = self.gate_limit * jax.nn.sigmoid(matmul(x[..., : kernel.shape[0]], kernel, self.value_gate.axes))
            v = v + gate[..., None] * saved(self.value_embedding(tokens, x.dtype)).reshape(v.shape)
        v = saved(all_gather_shared_head(v, self.kv_heads))
        if cache is not None:
            cache = LayerCache(*(write(old, new, positions) for old, new in zip(cache, (k, v))))
        if cache is None or positions is None:  # nothing came before
            y = attend(q, k, v, segment_ids=segment_ids, window=self.window, layer=self.layer)
        elif positions.ndim == 2:
            y = attend_to_cache(q, cache, positions, self.window)
        else:
            y = attend(q, cache.keys.swapaxes(1, 2), cache.values.swapaxes(1, 2), positions, window=self.window)
        return psum_over_tensor(self.out(y)), cache
