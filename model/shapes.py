"""The network's parameters as names and shapes, to count them or plan with them without arrays."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
from flax import nnx

from configs.schema import ModelConfig
from model.gpt import abstract_model, map_parameters
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
