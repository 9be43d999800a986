"""Checksums of a checkpoint's arrays and facts, by which flipped bits are noticed when it is read."""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from run.runtime import Damaged
from training.optimizer import path_name


def checksums(tree: Any) -> dict[str, int]:
    """A number for each array [...] of elements of at most 4 bytes, the same on every mesh: the sum of its elements'
    bits, each times an odd number of its own, modulo 2^32. So no single element can change unnoticed."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_checksums([leaf for _, leaf in leaves]))
    return {path_name(path): int(total) for (path, _), total in zip(leaves, sums)}


@jax.jit
def _checksums(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    def checksum(leaf: Array) -> UInt32[Array, ""]:
        position = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return [checksum(leaf) for leaf in leaves]


def require_checksums(saved: dict[str, int], tree: Any) -> None:
    """Damaged, with the arrays' names, where a tree's checksums are not those that were saved."""
    if wrong := [name for name, total in checksums(tree).items() if saved.get(name) != total]:
        raise Damaged(f"{len(wrong)} array(s) are not what was saved: {', '.join(wrong[:3])}")


def digest(facts: dict) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
