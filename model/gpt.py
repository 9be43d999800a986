"""The network: nanochat's GPT, read from top (tokens) to bottom (logits). Then its parameters as names and shapes,
without arrays, and counts of them and of floating-point operations."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Primitive
from jaxtyping import Array, Float, Int, Key

from model.attention import Attention, Inputs
from model.cache import LayerCache
from model.kernels import window_of
from model.layers import SAVED, Embedding, Linear, Scalars, dropout, relu_squared, rms_norm
from model.parallel import own_heads, psum_over_tensor, vary_over_tensor
from model.rotary import rotary_angles
from options.schema import SMEAR_CHANNELS, ModelConfig


class KVCache(NamedTuple):
    """The state of sampling after the positions read so far."""

    layers: list[LayerCache]
    last: Float[Array, "batch width"]
    """The newest position's embedding, which `smear` adds to the next."""


class MLP(nnx.Module):
    """width -> 4 width -> width, with relu squared (arXiv:2109.08668) between."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs | None):
        # 0.4 of the usual standard deviation, as nanochat
        uniform = nnx.initializers.variance_scaling(0.4**2, "fan_in", "uniform")
        zeros, matrix = nnx.initializers.zeros, partial(Linear, group="matrices", rngs=rngs)
        self.up = matrix((config.width, 4 * config.width), uniform, axes=("fsdp", "tensor"))
        self.down = matrix((4 * config.width, config.width), zeros, axes=("tensor", "fsdp"))

    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        return psum_over_tensor(self.down(relu_squared(self.up(vary_over_tensor(x)))))


class Block(nnx.Module):
    """Attention, then MLP. Each reads the normed residual stream and adds to it. Both start as zero."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs | None):
        self.dropout = config.dropout
        self.attention = Attention(config, layer, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch length width"], inputs: Inputs, cache: LayerCache | None
    ) -> tuple[Float[Array, "batch length width"], LayerCache | None]:
        y, cache = self.attention(rms_norm(x), inputs, cache)
        number = 2 * self.attention.layer
        x = x + dropout(y, self.dropout, inputs.dropout_keys, number)
        y = self.mlp(rms_norm(x))
        return x + dropout(y, self.dropout, inputs.dropout_keys, number + 1), cache


@jax.custom_vjp
def widened(narrow: Float[Array, "..."], wide: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `wide` by casting `narrow`, which has the same values in another type. `wide` is not read, but only it
    gets the gradient."""
    return narrow.astype(wide.dtype)


widened.defvjp(lambda narrow, wide: (widened(narrow, wide), None), lambda _, gradient: (None, gradient))


def is_saved(primitive: Primitive, *_: Any, **params: Any) -> bool:
    """Return whether `remat=products` saves the output of `primitive`: arrays marked by `saved`, and outputs of cuDNN's
    attention, log-sum-exps included, which JAX cannot name."""
    named = jax.checkpoint_policies.save_only_these_names(SAVED)
    return primitive.name == "dot_product_attention_fwd_wrapper" or named(primitive, **params)


def rematerialized(block: Block, remat: str, dtype: jnp.dtype) -> Callable:
    """Return `block` with `remat`: the forward pass saves all activations (`none`), all except the MLP's hidden layer
    (`products`), or only the block's input (`block`). The backward pass recomputes the rest. Parameters are saved in
    the activations' `dtype`; float32, the type of their gradients, would keep a second copy."""
    if remat == "none":
        return block
    policy = is_saved if remat == "products" else jax.checkpoint_policies.nothing_saveable
    graphdef, params = nnx.split(block, nnx.Param)

    @partial(jax.checkpoint, policy=policy)
    def apply(narrow: Any, params: Any, x: Array, inputs: Inputs, cache: LayerCache | None) -> tuple:
        return nnx.merge(graphdef, jax.tree.map(widened, narrow, params))(x, inputs, cache)

    return partial(apply, jax.tree.map(lambda p: jax.lax.stop_gradient(p).astype(dtype), params), params)


class GPT(nnx.Module):
    """nanochat's GPT: no biases, untied head, norms without parameters; its later features are options.

    `dtype` is the type of the activations; parameters are float32. Without `rngs` they are only shapes and types.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs | None):
        self.config = config
        self.dtype = dtype
        vocab, width, normal = config.vocab_size, config.width, nnx.initializers.normal
        self.embed = Embedding(vocab, width, normal(0.8), axes=("tensor", "fsdp"), group="embed", rngs=rngs)
        self.blocks = nnx.List([Block(config, layer, rngs=rngs) for layer in range(config.depth)])
        self.lm_head = Linear((width, vocab), normal(0.001), axes=("fsdp", "tensor"), group="lm_head", rngs=rngs)
        if config.smear:
            gate = nnx.initializers.uniform(0.02)
            self.smear_gate = Linear((SMEAR_CHANNELS, 1), gate, axes=(None, None), group="scalars", rngs=rngs)
        # The numbers come last: they use random keys, which must not change the initial matrices.
        share = np.linspace(0, 1, config.depth)  # share of the blocks below
        if config.resid_lambdas:
            self.resid_lambdas = Scalars(1.15 - 0.10 * share, group="resid_lambdas", rngs=rngs)
        if config.x0_lambdas:
            self.x0_lambdas = Scalars(0.20 - 0.15 * share, group="x0_lambdas", rngs=rngs)
        if config.smear:
            self.smear_lambda = Scalars([0.0], group="scalars", rngs=rngs)
        if config.backout:
            self.backout_lambda = Scalars([0.2], group="scalars", rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        cache: KVCache | None = None,
        start: Int[Array, ""] | Int[Array, "batch 1"] | int = 0,
        segment_ids: Int[Array, "batch length"] | None = None,
    ) -> tuple[Float[Array, "batch length vocab"], KVCache | None]:
        """Return the logits *before* the softcap (`model.loss.softcap`), in the compute type, and the cache as in
        `activations`."""
        x, cache = self.activations(tokens, cache, start, segment_ids)
        return self.lm_head(x), cache

    def activations(
        self,
        tokens: Int[Array, "batch length"],
        cache: KVCache | None = None,
        start: Int[Array, ""] | Int[Array, "batch 1"] | int = 0,
        segment_ids: Int[Array, "batch length"] | None = None,
        dropout_keys: Key[Array, "batch"] | None = None,
    ) -> tuple[Float[Array, "batch length width"], KVCache | None]:
        """Return the head's input. The loss starts from it, so all logits need not exist at once.

        With a `cache`, `tokens` are at positions `start`, `start + 1`, ... after those already in it; the extended
        cache is returned, too. `start` [batch, 1] gives each row its own start. With `segment_ids`, positions
        attend within their own segment only. With `dropout_keys`, one for each row, there is dropout.
        """
        config = self.config
        places = start + jnp.arange(tokens.shape[1])
        positions = None if isinstance(start, int) and start == 0 else places
        angles = rotary_angles(places, config.head_dim, config.rotary_base)
        inputs = Inputs(tokens, positions, angles, segment_ids, dropout_keys)
        x = embedded = self.embedded(tokens)
        if config.smear:
            x = self._smeared(embedded, cache, segment_ids)
        first, middle, grown = x, x, []
        for i, block in enumerate(self.blocks):
            if config.resid_lambdas or config.x0_lambdas:
                scaled = self.resid_lambdas.times(i, x) if config.resid_lambdas else x
                added = self.x0_lambdas.times(i, first) if config.x0_lambdas else 0
                x = (scaled + added).astype(self.dtype)
            apply = rematerialized(block, config.remat, self.dtype)
            x, layer_cache = apply(x, inputs, cache.layers[i] if cache else None)
            grown.append(layer_cache)
            if i == config.depth // 2:
                middle = x
        if config.backout:
            x = (x - self.backout_lambda.times(0, middle)).astype(self.dtype)
        return vary_over_tensor(rms_norm(x)), KVCache(grown, embedded[:, -1]) if cache else None

    def embedded(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length width"]:
        """Return the input of the blocks, before `smear`."""
        return rms_norm(psum_over_tensor(self.embed(tokens, self.dtype)))

    def _smeared(
        self,
        x: Float[Array, "batch length width"],
        cache: KVCache | None,
        segment_ids: Int[Array, "batch length"] | None,
    ) -> Float[Array, "batch length width"]:
        """Add the embedding of the previous token of the same segment, gated by the token's own."""
        last = cache.last if cache else jnp.zeros_like(x[:, 0])
        before = jnp.concatenate([last[:, None], x[:, :-1]], axis=1)
        if segment_ids is not None:
            starts = jnp.diff(segment_ids, prepend=segment_ids[:, :1]) != 0
            before = jnp.where(starts[..., None], 0, before)
        gate = jax.nn.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))
        return x + self.smear_lambda.times(0, gate).astype(self.dtype) * before

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `capacity` positions of `batch` rows, for this device's heads along `tensor`."""
        shape = (batch, own_heads(self.config.kv_heads)[1], capacity, self.config.head_dim)
        layers = [LayerCache(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in self.blocks]
        return KVCache(layers, jnp.zeros((batch, self.config.width), self.dtype))


@cache
def abstract_model(config: ModelConfig) -> GPT:
    """Return the network with shapes and types instead of parameters, without compute. All callers share it; clone it
    to change it."""
    return GPT(config, jnp.dtype("float32"), rngs=None)


def map_parameters(of: Callable[[nnx.Param], Any], config: ModelConfig) -> dict:
    """Return a tree like the parameters', with `of(param)` for each. `param` has a shape, a type, and the declarations
    `param.get_metadata("axes")` and `"group"`."""
    state = nnx.state(abstract_model(config))
    return nnx.to_pure_dict(jax.tree.map(of, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


class Parameter(NamedTuple):
    """A parameter as the network declares it."""

    name: str
    """`blocks.0.mlp.up.kernel`"""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """For each dimension, the mesh axis that divides it."""
    group: str
    """Group of the optimizer."""
    product: bool
    """True for the matrix of a product with the activations (every `Linear`'s)."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """Return all of a network's parameters, in the order of its tree."""
    plain = replace(config, remat="none", loss_chunks=1, dtype="auto", dropout=0.0)  # changes none
    return _parameters(plain)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its dotted name."""
    return {p.name: p.shape for p in parameters(config)}


def kinds(config: ModelConfig) -> tuple[tuple[Parameter, int], ...]:
    """Return the parameters and their counts. Parameters that differ only in their block count as one."""
    return tuple(Counter(p._replace(name=p.name.rpartition(".")[2]) for p in parameters(config)).items())


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each optimizer group. The plain network has only `embed`, `matrices` and
    `lm_head`."""
    counts = Counter()
    for parameter, count in kinds(config):
        counts[parameter.group] += count * parameter.size
    return dict(counts)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs of one training token, forward and backward: 6 for each parameter of a `Linear`, plus attention.
    Attention takes 12 x heads x head_dim x sequence_length (or the window, if shorter) per block, without the causal
    discount.

    PaLM (arXiv:2204.02311, appendix B) and nanochat count in the same way, so MFU is comparable.
    """
    products = sum(count * parameter.size for parameter, count in kinds(config) if parameter.product)
    windows = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    return 6 * products + 12 * config.heads * config.head_dim * sum(windows)


@cache
def _parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    modules = nnx.iter_modules(abstract_model(config))
    products = {(*path, "kernel") for path, module in modules if isinstance(module, Linear)}
    declared: Any = map_parameters(lambda p: (p.shape, p.get_metadata("axes"), p.get_metadata("group")), config)
    declarations = []
    for path, (shape, axes, group) in jax.tree_util.tree_leaves_with_path(
        declared, is_leaf=lambda leaf: isinstance(leaf, tuple)
    ):
        keys = tuple(key.key for key in path)
        declarations.append(Parameter(".".join(map(str, keys)), shape, axes, group, keys in products))
    return tuple(declarations)
