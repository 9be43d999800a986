"""The network's parameters as names and shapes, without arrays, and counts of them and of floating-point operations."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
from flax import nnx

from configs.schema import ModelConfig
from model.gpt import abstract_model, map_parameters
from model.kernels import window_of
from model.layers import Linear


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
    plain = replace(config, remat="none", loss_chunks=1, dtype="auto", z_loss=0.0, dropout=0.0)  # changes none
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
    seen = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    return 6 * products + 12 * config.heads * config.head_dim * sum(seen)


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
