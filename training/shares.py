"""The storage of parameters on a mesh, in a share for each device, and its conversion to the network's arrays.

Inside `jax.shard_map` JAX knows the mesh axes over which an array varies, that is, may differ between devices. A
gradient with respect to an array that does not vary over an axis is summed over it at each use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from model.parallel import in_shard_map, mark_varying, psum, psum_scatter
from options.schema import DATA_AXES

ACROSS, WITHIN = DATA_AXES[0], DATA_AXES[1:]
STORED_ORDER = ("fsdp", "tensor", *WITHIN, ACROSS)
"""The order in which the mesh's axes divide a dimension that several of them divide, the major one first."""


@dataclass(frozen=True)
class ShardLayout:
    """Storage of a parameter, or of its moment, on a mesh: divided over every axis, with zeros as padding at the end of
    a dimension that the axes do not divide."""

    shape: tuple[int, ...]
    """Without padding."""
    axes: tuple[str | None, ...]
    """For each dimension, the axis over which the network divides it."""
    stored: tuple[int, ...]
    """With padding."""
    spec: tuple[tuple[str, ...], ...]
    """For each dimension, all axes that divide it, in STORED_ORDER."""

    def dimension(self, axis: str) -> int:
        """Return the dimension that an axis of the mesh divides."""
        return next(i for i, names in enumerate(self.spec) if axis in names)


def shard_layout(shape: tuple[int, ...], axes: tuple[str | None, ...], sizes: Mapping[str, int]) -> ShardLayout:
    """Return how a mesh of these `sizes` stores a parameter that the network divides over `axes`.

    Every axis of `DATA_AXES` divides one dimension. The least padded way is taken; padding below 1% counts as none.
    Ties prefer no padding in dimensions that `axes` divides, then the fewest divided dimensions, then the longest
    dimension. Single numbers are replicated.
    """
    if not shape:
        return ShardLayout((), (), (), ())

    def way(dimensions: tuple[int, ...]) -> ShardLayout:
        names = [
            ((axis,) if axis else ()) + tuple(name for name, at in zip((*WITHIN, ACROSS), dimensions) if at == i)
            for i, axis in enumerate(axes)
        ]
        stored = tuple(padded(size, prod(sizes[name] for name in divided)) for size, divided in zip(shape, names))
        return ShardLayout(shape, axes, stored, tuple(names))

    def cost(candidate: ShardLayout) -> tuple[float, int, int, int, int]:
        shares = [size // (sizes[axis] if axis else 1) for size, axis in zip(shape, axes)]
        along = [candidate.dimension(axis) for axis in DATA_AXES if sizes[axis] > 1]
        # Padding moves the borders between devices along an axis that divides the dimension, too.
        moved = sum(
            stored > size and axis is not None and sizes[axis] > 1
            for size, stored, axis in zip(shape, candidate.stored, axes)
        )
        size = prod(candidate.stored)
        return max(1.0 * size, 1.01 * prod(shape)), moved, len(set(along)), size, -sum(shares[i] for i in along)

    return min(map(way, product(range(len(shape)), repeat=len(DATA_AXES))), key=cost)


def summed_layout(layout: ShardLayout, shape: tuple[int, ...], sizes: Mapping[str, int]) -> ShardLayout:
    """Return how a mesh of these `sizes` stores a number for each row or column of a matrix with this layout, in an
    array of `shape` [rows, 1] or [1, columns]: every axis that divides the matrix divides its longer dimension."""
    divided = tuple(axis for axis in STORED_ORDER if any(axis in names for names in layout.spec))
    along = shape.index(max(shape))
    spec = tuple(divided if i == along else () for i in range(len(shape)))
    stored = tuple(padded(size, prod(sizes[axis] for axis in names)) for size, names in zip(shape, spec))
    return ShardLayout(shape, (None,) * len(shape), stored, spec)


def copies(layout: ShardLayout, sizes: Mapping[str, int]) -> int:
    """Return how many devices of a mesh of these `sizes` hold the same share."""
    return prod(size for axis, size in sizes.items() if all(axis not in names for names in layout.spec))


def padded(size: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `size`."""
    return -(-size // divisor) * divisor


def on_each_device(function: Callable, mesh: Mesh, dtype: jnp.dtype, in_specs: Any, out_specs: Any) -> Callable:
    """Return `function`, written for one device, as a function of global arrays, in `jax.shard_map`, manual over all
    axes of the mesh. `dtype`: the type of its activations."""

    @wraps(function)
    def with_precision(*arrays: Any) -> Any:
        # By default a product of float32 arrays rounds them: to bfloat16 on a TPU, to TF32 on a GPU from Ampere on.
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
            return function(*arrays)

    if mesh.size == 1:  # XLA on CPU copies the input of a collective among one device
        return with_precision
    return jax.shard_map(with_precision, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def all_gather_data(params: dict, layouts: dict, dtype: jnp.dtype) -> dict:
    """Return, for one device, the parameters in the compute type, all-gathered over `data`. `fsdp` and `tensor` still
    divide them, without padding."""

    def gathered(share: Array, layout: ShardLayout) -> Array:
        # Single numbers keep their type: they cost nothing, and multiply large arrays.
        share = share if share.ndim == 1 else share.astype(dtype)
        if not in_shard_map():
            return share
        # First between slices or nodes: their slow links then carry only each device's share.
        if jax.lax.axis_size(ACROSS) > 1:
            share = jax.lax.all_gather(share, ACROSS, axis=layout.dimension(ACROSS), tiled=True)
        if jax.lax.axis_size(WITHIN) > 1:
            share = joined(jax.lax.all_gather(share, WITHIN), factors_within(layout))
        for axis, dimension, start, size in padded_dimensions(layout):
            if axis:
                share = jax.lax.all_gather(share, axis, axis=dimension, tiled=True)
            share = jax.lax.dynamic_slice_in_dim(share, start, size, dimension)
        # Marked here, outside the scan: otherwise every micro-batch would end with a psum of the gradient.
        return mark_varying(share, replicated_axes(layout))

    return jax.tree.map(gathered, params, layouts)


def reduce_scatter_data(gradients: dict, layouts: dict) -> dict:
    """Return, for one device, the gradients padded as their parameters and reduce-scattered over `data`. Sum over
    `fsdp`, too, if it does not divide a parameter."""

    def scattered(gradient: Array, layout: ShardLayout) -> Array:
        if not in_shard_map():
            return gradient
        for axis, dimension, start, size in padded_dimensions(layout):
            widths = [(0, layout.stored[dimension] - size if i == dimension else 0) for i in range(gradient.ndim)]
            gradient = jnp.pad(gradient, widths)
            if axis:
                gradient = psum_scatter(jnp.roll(gradient, start, dimension), axis, dimension)
        if jax.lax.axis_size(WITHIN) > 1:
            gradient = psum_scatter(parted(gradient, factors_within(layout)), WITHIN, 0)[0]
        if jax.lax.axis_size(ACROSS) > 1:
            gradient = psum_scatter(gradient, ACROSS, layout.dimension(ACROSS))
        return psum(gradient, replicated_axes(layout))

    return jax.tree.map(scattered, gradients, layouts)


def factors_within(layout: ShardLayout) -> list[tuple[int, int]]:
    """Return, for one device, the sizes of the axes of `data` inside a slice or node, and the dimension that each
    divides."""
    return [(jax.lax.axis_size(axis), layout.dimension(axis)) for axis in WITHIN]


def padded_dimensions(layout: ShardLayout) -> Iterator[tuple[str | None, int, Array | int, int]]:
    """Yield, for one device and each padded dimension: the axis over which the network divides it, if it has more than
    one device; the dimension; the start of this device's part of the parameter in it; and its size. Padding moves the
    borders between devices along that axis, so the complete dimension is gathered to find them."""
    for dimension, (axis, size, stored) in enumerate(zip(layout.axes, layout.shape, layout.stored)):
        if size == stored:
            continue
        if axis is None or jax.lax.axis_size(axis) == 1:
            yield None, dimension, 0, size
        else:
            part = size // jax.lax.axis_size(axis)
            yield axis, dimension, part * jax.lax.axis_index(axis), part


def replicated_axes(layout: ShardLayout) -> tuple[str, ...]:
    """Return the axes that divide the rows of a batch, but replicate this parameter."""
    return () if "fsdp" in layout.axes else ("fsdp",)


def joined(parts: Float[Array, "..."], factors: Sequence[tuple[int, int]]) -> Float[Array, "..."]:
    """Return an array from its parts [product of sizes, *share]. `factors`: for each axis of the mesh, the number of
    parts and the dimension that it divides, the major axis first."""
    sizes = [size for size, _ in factors]
    order, shape = _order(factors, parts.ndim - 1), list(parts.shape[1:])
    for size, dimension in factors:
        shape[dimension] *= size
    return parts.reshape(*sizes, *parts.shape[1:]).transpose(order).reshape(shape)


def parted(array: Float[Array, "..."], factors: Sequence[tuple[int, int]]) -> Float[Array, "..."]:
    """Return the parts [product of sizes, *share] of an array, so that `joined` gives the array again."""
    share = list(array.shape)
    for size, dimension in factors:
        share[dimension] //= size
    order = _order(factors, array.ndim)
    split = [*(size for size, _ in factors), *share]
    parts = array.reshape([split[i] for i in order]).transpose(np.argsort(order))
    return parts.reshape(prod(size for size, _ in factors), *share)


def _order(factors: Sequence[tuple[int, int]], rank: int) -> list[int]:
    """Return the factors and, after them, the dimensions of a share, in the array's order."""
    along = lambda i: [j for j, (_, dimension) in enumerate(factors) if dimension == i]
    return [position for i in range(rank) for position in (*along(i), len(factors) + i)]
