"""Checksums of a checkpoint's arrays and facts, which detect flipped bits when it is read."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from hosts.runtime import Damaged
from training.optimizer import path_name


def checksums(tree: Any, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> dict[str, int]:
    """Return a number for each array [...] of elements of at most 4 bytes, the same on every mesh: the sum of its
    elements' bits, each multiplied by its own odd number, modulo 2^32. So it detects a change of any single element.

    `shapes` are the parameters' without the mesh's padding, whose zeros add nothing. A moment has its parameter's
    shape.
    """
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    of = {name: tuple(shape) for name, shape in shapes.items()}
    # A moment's name ends with its parameter's.
    ends = lambda name: (name[i:] for i in range(len(name)) if i == 0 or name[i - 1] == ".")
    unpadded = [next((of[end] for end in ends(name) if end in of), leaf.shape) for name, leaf in leaves.items()]
    sums = jax.device_get(_checksums(list(leaves.values()), tuple(unpadded)))
    return dict(zip(leaves, map(int, sums)))


@partial(jax.jit, static_argnums=1)
def _checksums(leaves: list[Array], shapes: tuple[tuple[int, ...], ...]) -> list[UInt32[Array, ""]]:
    def checksum(leaf: Array, shape: tuple[int, ...]) -> UInt32[Array, ""]:
        position = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(shape if leaf.ndim else ()):
            # A moment may have summed a dimension to one number.
            size = min(size, leaf.shape[axis])
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return [checksum(leaf, shape) for leaf, shape in zip(leaves, shapes)]


def require_checksums(saved: dict[str, int], tree: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise Damaged, with the arrays' names, if a tree's checksums differ from the saved ones."""
    if wrong := [name for name, total in checksums(tree, shapes).items() if saved.get(name) != total]:
        raise Damaged(f"{len(wrong)} array(s) differ from what was saved: {', '.join(wrong[:3])}")


def digest(facts: dict) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
