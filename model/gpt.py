"""The network: nanochat's plain GPT, read from top (tokens) to bottom (logits)."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.schema import ModelConfig
from model.attention import Attention, LayerCache
from model.layers import Embedding, Linear, rms_norm
from model.parallel import join, split
from model.rotary import rotary_angles

KVCache = list[LayerCache]


class MLP(nnx.Module):
    """width -> 4 width -> width, with relu squared (arXiv:2109.08668) between."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        # 0.4 of the usual standard deviation, as nanochat
        uniform = nnx.initializers.variance_scaling(0.4**2, "fan_in", "uniform")
        self.up = Linear(config.width, 4 * config.width, uniform, width_axis=0, rngs=rngs)
        self.down = Linear(4 * config.width, config.width, nnx.initializers.zeros, width_axis=1, rngs=rngs)

    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        return join(self.down(jnp.square(jax.nn.relu(self.up(split(x))))))


class Block(nnx.Module):
    """Attention, then MLP, each on the normed residual stream and added to it. Both start as zero."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch length width"],
        angles: tuple[Float[Array, "length half"], Float[Array, "length half"]],
        positions: Int[Array, "length"],
        cache: LayerCache | None,
        segment_ids: Int[Array, "batch length"] | None,
    ) -> tuple[Float[Array, "batch length width"], LayerCache | None]:
        y, cache = self.attention(rms_norm(x), angles, positions, cache, segment_ids)
        x = x + y
        return x + self.mlp(rms_norm(x)), cache


def rematerialized(apply: Callable, remat: str) -> Callable:
    """What the backward pass finds of a block: all its activations, its products, or its input alone."""
    if remat == "none":
        return apply
    policies = jax.checkpoint_policies
    return jax.checkpoint(apply, policy=policies.dots_saveable if remat == "products" else policies.nothing_saveable)


class GPT(nnx.Module):
    """nanochat's plain GPT: no biases, untied head, norms without parameters.

    `dtype` is the type of the activations; parameters are float32.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtype
        normal = nnx.initializers.normal
        self.embed = Embedding(config.vocab_size, config.width, normal(0.8), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.lm_head = Linear(config.width, config.vocab_size, normal(0.001), width_axis=0, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        cache: KVCache | None = None,
        start: Int[Array, ""] | int = 0,
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], KVCache | None]:
        """Logits *before* the softcap, in the compute type: the loss and the sampler cap them (`model.loss.softcap`)
        where they read them, so that the capped logits never exist as an array. In the step they are this device's
        share of the vocabulary.

        With a `cache`, `tokens` stand at positions `start`, `start + 1`, ... after those already in it, and the cache
        with them added is returned. With `segment_ids`, positions attend within their own segment only.
        """
        positions = start + jnp.arange(tokens.shape[1])
        angles = rotary_angles(positions, self.config.head_dim, self.config.rotary_base)
        x = rms_norm(join(self.embed(tokens, self.dtype)))
        grown = []
        for block, layer_cache in zip(self.blocks, cache or [None] * len(self.blocks)):
            apply = partial(block, angles=angles, positions=positions, cache=layer_cache, segment_ids=segment_ids)
            x, layer_cache = rematerialized(apply, self.config.remat)(x)
            grown.append(layer_cache)
        return self.lm_head(split(rms_norm(x))), grown if cache else None

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """Room for `capacity` positions of `batch` rows."""
        shape = (batch, capacity, self.config.kv_heads, self.config.head_dim)
        return [LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.blocks]
