"""The arithmetic of training/mesh.py, without JAX: how a mesh divides arrays. `sizes` are the sizes of its axes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import gcd, isqrt, prod

from configs.schema import DATA_AXES, BatchConfig, MeshConfig, UserError

AXES = ("data", "fsdp", "tensor")
"""The axes that a user names."""


def mesh_shape(config: MeshConfig, devices: int, described: str) -> tuple[int, int, int]:
    """Return `(data, fsdp, tensor)` of a mesh of these devices, `described` in the message. Raise UserError, with what
    would work, if the product is another number."""
    inner = config.fsdp * config.tensor
    data = devices // inner if config.data == -1 else config.data
    if data * inner != devices:
        works = f"{devices // inner} or -1" if devices % inner == 0 else "-1, and fsdp x tensor that divide them"
        raise UserError(
            f"--mesh.data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not fit the {described}; "
            f"use --mesh.data={works}"
        )
    return data, config.fsdp, config.tensor


def step_shape(config: BatchConfig, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """Return `(K, B, T)` of a step's arrays: K micro-batches of B rows (over the mesh) of T tokens. The step has
    `config.tokens_per_step`. With `rows_per_device=auto` it is one micro-batch.

    Raise UserError, with the sizes that would work, if the step's rows do not divide.
    """
    replicas = sizes["data"] * sizes["fsdp"]
    rows, unit = config.tokens_per_step // config.sequence_length, config.sequence_length * replicas
    here = rows if config.rows_per_device == "auto" else config.rows_per_device
    shares = [n for n in range(1, rows // replicas + here + 1) if n <= here or n % here == 0]
    below = [n * unit for n in shares if n * replicas <= rows][-1:]
    above = [n * unit for n in shares if n * replicas > rows][:1]
    works = " or ".join(map(str, below + above))
    size = config.tokens_per_step
    option = f"--batch.tokens_per_step={size}"
    if rows % replicas:
        raise UserError(
            f"{option} is {rows} rows of {config.sequence_length} tokens, "
            f"which {replicas} devices cannot share evenly; nearest that would work: {works}"
        )
    share = rows // replicas
    here = min(here, share)
    if share % here:
        raise UserError(
            f"--batch.rows_per_device={config.rows_per_device} does not divide the {share} rows a step that each of "
            f"{replicas} device(s) gets from {option}; "
            f"rows_per_device that would work: {[n for n in range(1, share + 1) if share % n == 0]}; "
            f"or tokens_per_step: {works}"
        )
    return share // here, here * replicas, config.sequence_length


def data_parts(data: int, across: int) -> tuple[int, int, int]:
    """Return the sizes of the axes `DATA_AXES`, whose product is `data`: `across` slices or nodes, and the rest as two
    factors as equal as possible, which two dimensions of a matrix can share."""
    within = data // across
    minor = max(size for size in range(1, isqrt(within) + 1) if within % size == 0)
    return across, within // minor, minor


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
    """For each dimension, all axes that divide it, the major one first."""

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
            ((axis,) if axis else ())
            + tuple(name for name, at in zip((*DATA_AXES[1:], DATA_AXES[0]), dimensions) if at == i)
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


def padded(size: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `size`."""
    return -(-size // divisor) * divisor


def inside(shape: tuple[int, int, int], size: int) -> tuple[int, int, int]:
    """Return the part of a mesh [data, fsdp, tensor] of `shape` inside a group of `size` devices: `tensor` as far as
    it fits, then `fsdp`; `data` takes the rest, and crosses device groups."""
    _, fsdp, tensor = shape
    tensor_inside = gcd(tensor, size)
    fsdp_inside = gcd(fsdp, size // tensor_inside)
    return size // (tensor_inside * fsdp_inside), fsdp_inside, tensor_inside
