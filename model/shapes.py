"""The network's parameters as names and shapes, kept on disk: what counts or plans needs neither JAX nor Flax."""

import hashlib
import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from configs import schema
from configs.files import cache_dir, write_whole
from configs.schema import ModelConfig

DATA = ("data_across", "data_major", "data_minor")
"""The mesh axes that make up `data`: between slices or nodes, and two inside one (training/layout.py)."""


class Parameter(NamedTuple):
    """A parameter as the network declares it."""

    name: str
    """`blocks.0.mlp.up.kernel`"""
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """For each dimension, the mesh axis that it is divided over."""
    group: str
    """Of the optimizer."""
    product: bool
    """Whether it is the matrix of a product with the activations (every `Linear`'s)."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All of a network's, in the order of its tree. The first time for a network takes JAX, and seconds."""
    return _parameters(_declaring(config))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its dotted name."""
    return {p.name: p.shape for p in parameters(config)}


def kinds(config: ModelConfig) -> tuple[tuple[Parameter, int], ...]:
    """The parameters, those alike but for where they are in the tree once, with their number."""
    return _kinds(_declaring(config))


def _declaring(config: ModelConfig) -> ModelConfig:
    """The config without what changes no parameter."""
    return replace(config, remat="none", loss_chunks=1, dtype="auto", z_loss=0.0)


@cache
def _kinds(config: ModelConfig) -> tuple[tuple[Parameter, int], ...]:
    return tuple(Counter(p._replace(name=p.name.rpartition(".")[2]) for p in _parameters(config)).items())


@cache
def _parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    sources = [file.read_bytes() for file in (Path(schema.__file__), *sorted(Path(__file__).parent.glob("*.py")))]
    key = hashlib.sha256(b"\0".join([repr(config).encode(), *sources])).hexdigest()
    kept = cache_dir() / "shapes" / f"{key[:32]}.json"
    try:
        rows = json.loads(kept.read_text())
    except (OSError, ValueError):
        rows = _declared(config)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, json.dumps(rows))
        except OSError:
            pass  # it is made again the next time
    return tuple(Parameter(name, tuple(shape), tuple(axes), *rest) for name, shape, axes, *rest in rows)


def _declared(config: ModelConfig) -> list[tuple]:
    import jax
    from flax import nnx

    from model.gpt import abstract_model, map_parameters
    from model.layers import Linear

    modules = nnx.iter_modules(abstract_model(config))
    products = {".".join(map(str, (*path, "kernel"))) for path, module in modules if isinstance(module, Linear)}
    declared = map_parameters(lambda p: (p.shape, p.get_metadata("axes"), p.get_metadata("group")), config)
    leaves = jax.tree_util.tree_leaves_with_path(declared, is_leaf=lambda leaf: isinstance(leaf, tuple))
    named = [(".".join(str(key.key) for key in path), leaf) for path, leaf in leaves]
    return [(name, *leaf, name in products) for name, leaf in named]


def window_of(config: ModelConfig, layer: int) -> int | None:
    """How many positions back a block sees; None: all. The last block sees all."""
    letter = "L" if layer == config.depth - 1 else config.window_pattern[layer % len(config.window_pattern)]
    if letter == "S" and config.short_window == 0:
        raise ValueError("model.short_window is 0: see configs.schema.resolved")
    return config.short_window if letter == "S" else None
