"""Causal attention with grouped-query heads, rotary positions and QK-norm, and the cache that sampling reads."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.schema import VALUE_GATE_CHANNELS, ModelConfig
from model.layers import Embedding, Linear, saved, symmetric_uniform
from model.parallel import platform, psum_over_tensor, vary_over_tensor
from model.rotary import Angles, rotate_and_norm
from model.shapes import window_of
from model.splash import fits, splash_attention

SHORTEST_FOR_CUDNN = 64  # positions; what sampling and scoring read of fewer gains nothing by it


class LayerCache(NamedTuple):
    """Keys (turned and normed) and values of the positions seen so far; later positions hold zeros."""

    keys: Float[Array, "batch capacity kv_heads head_dim"]
    values: Float[Array, "batch capacity kv_heads head_dim"]


class Inputs(NamedTuple):
    """What every block reads of the tokens besides the residual stream."""

    tokens: Int[Array, "batch length"]
    positions: Int[Array, "length"] | None
    """None where nothing came before: without a cache, or to fill one."""
    angles: Angles
    segment_ids: Int[Array, "batch length"] | None


def attend(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    positions: Int[Array, "length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    window: int | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Softmax attention of queries that are scaled already: causal, or from `positions` of the queries to all keys up
    to them; with `segment_ids`, only among positions of one segment; with `window`, only to so many positions back.

    The one place that chooses a kernel: splash attention on a TPU, cuDNN's on a GPU, plain products elsewhere and for
    the cache. Plain products take the queries in blocks, each with the keys that its queries can see.
    """
    same = None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if positions is None:
        if platform() == "tpu" and fits(q.shape[1], q.shape[3]):
            return splash_attention(q, k, v, segment_ids, window)
        if platform() in ("gpu", "cuda") and q.dtype == jnp.bfloat16 and q.shape[1] >= SHORTEST_FOR_CUDNN:
            back = None if window is None else (window, 0)
            return jax.nn.dot_product_attention(
                q, k, v, mask=same, scale=1.0, is_causal=True, local_window_size=back, implementation="cudnn"
            )
    length, keys = q.shape[1], k.shape[1]
    back = keys if window is None else window
    distance = (jnp.arange(length) if positions is None else positions)[:, None] - jnp.arange(keys)
    seen = ((distance >= 0) & (distance <= back))[None, None]
    seen = seen if same is None else seen & same
    if positions is not None:
        return plain_attention(q, k, v, seen)
    size = max(64, length // 8)
    blocks = ((slice(i, i + size), slice(max(0, i - back), i + size)) for i in range(0, length, size))
    return jnp.concatenate(
        [plain_attention(q[:, rows], k[:, cols], v[:, cols], seen[:, :, rows, cols]) for rows, cols in blocks], axis=1
    )


@jax.custom_vjp
def plain_attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    seen: Bool[Array, "#batch 1 length keys"],
) -> Float[Array, "batch length heads head_dim"]:
    """As `attend`, to the keys that are `seen`, at least one for each query. Written for few passes over the matrix of
    scores: its rows are divided by their sums after the product with v, and it is kept once."""
    return _plain_forward(q, k, v, seen)[0]


def _plain_forward(q: Array, k: Array, v: Array, seen: Array) -> tuple[Array, tuple[Array, ...]]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
    shares = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    sums = jnp.sum(shares, axis=-1).transpose(0, 3, 1, 2)[..., None]  # [batch, length, kv_heads, group, 1]
    shares = shares.astype(v.dtype)
    y = (jnp.einsum("bkgts,bskd->btkgd", shares, v, preferred_element_type=jnp.float32) / sums).astype(v.dtype)
    y = saved(y)
    return y.reshape(q.shape), (grouped, k, v, shares, sums, y)


def _plain_backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, shares, sums, y = residuals
    dy = dy.reshape(y.shape) / sums
    along = jnp.sum(dy * y.astype(jnp.float32), axis=-1).transpose(0, 2, 3, 1)[..., None]
    dy = dy.astype(v.dtype)
    dv = jnp.einsum("bkgts,btkgd->bskd", shares, dy)
    dshares = jnp.einsum("btkgd,bskd->bkgts", dy, v, preferred_element_type=jnp.float32)
    dscores = (shares * (dshares - along)).astype(v.dtype)
    dq = jnp.einsum("bkgts,bskd->btkgd", dscores, k)
    dk = jnp.einsum("bkgts,btkgd->bskd", dscores, q)
    return dq.reshape(*q.shape[:2], -1, q.shape[-1]), dk, dv, None


plain_attention.defvjp(_plain_forward, _plain_backward)


def has_value_embedding(config: ModelConfig, layer: int) -> bool:
    """Every other block has one, the last included."""
    return config.value_embeddings and layer % 2 == (config.depth - 1) % 2


class Attention(nnx.Module):
    """One attention sub-layer, of block number `layer`."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs | None):
        self.head_dim, self.qk_scale = config.head_dim, config.qk_scale
        self.window = window_of(config, layer)
        # As nanochat: uniform of the same standard deviation as a normal of 1/sqrt(width), to avoid outliers.
        uniform = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        matrix = partial(Linear, group="matrices", rngs=rngs)
        self.query = matrix(config.width, queries, uniform, axes=("fsdp", "tensor"))
        self.key = matrix(config.width, keys, uniform, axes=("fsdp", "tensor"))
        self.value = matrix(config.width, keys, uniform, axes=("fsdp", "tensor"))
        self.out = matrix(queries, config.width, nnx.initializers.zeros, axes=("tensor", "fsdp"))
        if has_value_embedding(config, layer):
            bound = (3 / config.width) ** 0.5  # as the value matrix
            table, gate = symmetric_uniform(bound), nnx.initializers.uniform(0.02)
            axes = ("fsdp", "tensor")
            self.value_embedding = Embedding(config.vocab_size, keys, table, axes=axes, group="value_embeds", rngs=rngs)
            self.value_gate = matrix(VALUE_GATE_CHANNELS, config.kv_heads, gate, axes=(None, "tensor"))

    def __call__(
        self, x: Float[Array, "batch length width"], inputs: Inputs, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch length width"], LayerCache | None]:
        tokens, positions, angles, segment_ids = inputs
        x = vary_over_tensor(x)
        heads = (*x.shape[:2], -1, self.head_dim)  # this device's own, along `tensor`
        # The scale of attention's scores is a factor of the queries here: applied later, it would round them twice.
        q: Array = rotate_and_norm(self.query(x).reshape(heads), angles, self.qk_scale * self.head_dim**-0.5)
        k: Array = rotate_and_norm(self.key(x).reshape(heads), angles, self.qk_scale)
        v = self.value(x).reshape(heads)
        if hasattr(self, "value_embedding"):
            gate = 3 * jax.nn.sigmoid(self.value_gate(x[..., :VALUE_GATE_CHANNELS]))
            v = v + gate[..., None] * saved(self.value_embedding(tokens, x.dtype)).reshape(heads)
        v = saved(v)
        if cache is not None:
            start = (0, 0 if positions is None else positions[0], 0, 0)
            cache = LayerCache(*(jax.lax.dynamic_update_slice(old, new, start) for old, new in zip(cache, (k, v))))
        if cache is None or positions is None:  # nothing came before
            y = attend(q, k, v, segment_ids=segment_ids, window=self.window)
        else:
            y = attend(q, *cache, positions, window=self.window)
        return psum_over_tensor(self.out(y.reshape(*x.shape[:2], -1))), cache
