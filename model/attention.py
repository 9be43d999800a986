"""Causal attention with grouped-query heads, rotary positions and QK-norm, and the cache that sampling reads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.schema import ModelConfig
from model.layers import Linear, rms_norm
from model.parallel import join, split
from model.rotary import rotate


class LayerCache(NamedTuple):
    """Keys (turned and normed) and values of the positions seen so far; later positions hold zeros."""

    keys: Float[Array, "batch capacity kv_heads head_dim"]
    values: Float[Array, "batch capacity kv_heads head_dim"]


def attend(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch keys kv_heads head_dim"],
    v: Float[Array, "batch keys kv_heads head_dim"],
    positions: Int[Array, "length"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
    """Softmax attention, scaled by head_dim^-0.5: causal, or from `positions` of the queries to all keys up to them;
    with `segment_ids`, only among positions of one segment.

    The one place that chooses a kernel: cuDNN's on a GPU, XLA's own elsewhere and for the cache.
    """
    if positions is None:
        cudnn = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
        same = None if segment_ids is None else (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        implementation = "cudnn" if cudnn else "xla"
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation=implementation)
    seen = jnp.arange(k.shape[1]) <= positions[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None], implementation="xla")


class Attention(nnx.Module):
    """One attention sub-layer."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        # As nanochat: uniform of the same standard deviation as a normal of 1/sqrt(width), to avoid outliers.
        uniform = nnx.initializers.variance_scaling(1.0, "fan_in", "uniform")
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = Linear(config.width, queries, uniform, width_axis=0, rngs=rngs)
        self.key = Linear(config.width, keys, uniform, width_axis=0, rngs=rngs)
        self.value = Linear(config.width, keys, uniform, width_axis=0, rngs=rngs)
        self.out = Linear(queries, config.width, nnx.initializers.zeros, width_axis=1, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        angles: tuple[Float[Array, "length half"], Float[Array, "length half"]],
        positions: Int[Array, "length"],
        cache: LayerCache | None,
        segment_ids: Int[Array, "batch length"] | None,
    ) -> tuple[Float[Array, "batch length width"], LayerCache | None]:
        x = split(x)
        heads = (*x.shape[:2], -1, self.head_dim)  # this device's own, along `tensor`
        q = rms_norm(rotate(self.query(x).reshape(heads), angles))
        k = rms_norm(rotate(self.key(x).reshape(heads), angles))
        v = self.value(x).reshape(heads)
        if cache is None:
            y = attend(q, k, v, segment_ids=segment_ids)
        else:
            start = (0, positions[0], 0, 0)
            cache = LayerCache(*(jax.lax.dynamic_update_slice(old, new, start) for old, new in zip(cache, (k, v))))
            y = attend(q, *cache, positions)
        return join(self.out(y.reshape(*x.shape[:2], -1))), cache
