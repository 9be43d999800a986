"""The deal of a stack of matrices to the devices of a mesh: from a share of each matrix on every device to some
complete matrices on each, and back.

Everything here is written for one device, in `jax.shard_map`. One all-to-all over all axes of the mesh that divide the
matrices sends each device its part of the stack, and another returns the shares of the results. An axis that divides
none of them, as for the small gates, cuts the stack; the results are all-gathered along it.
"""

from collections.abc import Mapping, Sequence

import jax
from jaxtyping import Array, Shaped

from model.parallel import in_shard_map
from training.mesh import resized
from training.shares import STORED_ORDER, joined, parted

Dimensions = Mapping[str, int]
"""For each axis of the mesh that divides the arrays of a stack, in STORED_ORDER, the dimension that it divides."""


def deal_out(
    shares: Shaped[Array, "count *share"], dimensions: Dimensions, shape: Sequence[int]
) -> Shaped[Array, "part *shape"]:
    """Return this device's part of the stack, count / devices of it, as complete arrays, cut to `shape`."""
    shares = own_part(shares, undivided_axes(dimensions))
    if dimensions:
        axes = tuple(dimensions)
        parts = jax.lax.all_to_all(shares, axes, 0, 0, tiled=True)
        parts = parts.reshape(jax.lax.axis_size(axes), -1, *shares.shape[1:])
        factors = factors_of(dimensions)
        shares = jax.vmap(lambda parts: joined(parts, factors), 1)(parts)
    return resized(shares, (len(shares), *shape))


def collect(
    part: Shaped[Array, "part *shape"], dimensions: Dimensions, share: Sequence[int]
) -> Shaped[Array, "count *share"]:
    """Return this device's shares [*share] of all arrays of the stack, from its part of them."""
    factors, stored = factors_of(dimensions), list(share)
    for size, dimension in factors:
        stored[dimension] *= size
    part = resized(part, (len(part), *stored))
    if dimensions:
        parts = jax.vmap(lambda array: parted(array, factors), out_axes=1)(part)
        part = jax.lax.all_to_all(parts.reshape(-1, *share), tuple(dimensions), 0, 0, tiled=True)
    for axis in reversed(undivided_axes(dimensions)):
        part = jax.lax.all_gather(part, axis, tiled=True, to="invarying")
    return part


def own_flags(flags: Shaped[Array, "count"], dimensions: Dimensions) -> Shaped[Array, "part"]:
    """Return the flags of this device's part of the stack, from those of all of it."""
    return own_part(flags, (*undivided_axes(dimensions), *dimensions))


def own_part(stack: Shaped[Array, "count *share"], axes: Sequence[str]) -> Shaped[Array, "part *share"]:
    """Return the part of a stack for this device's position along `axes`, the major one first."""
    for axis in axes:
        size = len(stack) // jax.lax.axis_size(axis)
        stack = jax.lax.dynamic_slice_in_dim(stack, size * jax.lax.axis_index(axis), size)
    return stack


def undivided_axes(dimensions: Dimensions) -> list[str]:
    """Return the axes of more than one device that divide no array of the stack."""
    axes = STORED_ORDER if in_shard_map() else ()
    return [axis for axis in axes if axis not in dimensions and jax.lax.axis_size(axis) > 1]


def factors_of(dimensions: Dimensions) -> list[tuple[int, int]]:
    """Return the size of each axis that divides the arrays, and the dimension that it divides."""
    return [(jax.lax.axis_size(axis), dimension) for axis, dimension in dimensions.items()]
