"""Who holds what, in numbers: the arithmetic of training/mesh.py, without JAX. `sizes` are those of the mesh's axes."""

from collections.abc import Mapping
from math import gcd

from configs.schema import BatchConfig, MeshConfig, UserError

AXES = ("data", "fsdp", "tensor")


def mesh_shape(config: MeshConfig, devices: int, described: str) -> tuple[int, int, int]:
    """`(data, fsdp, tensor)` of a mesh of so many devices, which are `described` for the message. UserError, with what
    would work, where it is not of as many."""
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
    """`(K, B, T)` of a step's arrays: K micro-batches of B rows (over the whole mesh) of T tokens. The step is one of
    `config.tokens_per_step`, whatever the ramp.

    UserError, with the sizes that would work, where the step's rows do not divide.
    """
    replicas = sizes["data"] * sizes["fsdp"]
    rows, unit = config.tokens_per_step // config.sequence_length, config.sequence_length * replicas
    here = config.rows_per_device
    shares = [n for n in range(1, rows // replicas + here + 1) if n <= here or n % here == 0]
    below = [n * unit for n in shares if n * replicas <= rows][-1:]
    above = [n * unit for n in shares if n * replicas > rows][:1]
    works = " or ".join(map(str, below + above))
    size = config.tokens_per_step
    option = f"--batch.ramp={config.ramp}: {size}" if config.ramp else f"--batch.tokens_per_step={size}"
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


def divided(
    shape: tuple[int, ...], axes: tuple[str | None, ...], sizes: Mapping[str, int]
) -> tuple[str | tuple[str, ...] | None, ...]:
    """The axes that each dimension of a parameter is divided over: those it names, and `data` besides, along the
    longest dimension that still divides; without one, it is whole on every replica."""
    shares = [size // (sizes[axis] if axis else 1) for size, axis in zip(shape, axes)]
    divisible = [i for i, size in enumerate(shares) if size % sizes["data"] == 0]
    spec: list = list(axes)
    if divisible:
        longest = max(divisible, key=lambda i: shares[i])
        spec[longest] = (axes[longest], "data") if axes[longest] else "data"
    return tuple(spec)


def inside(shape: tuple[int, int, int], size: int) -> tuple[int, int, int]:
    """The part of a mesh [data, fsdp, tensor] of `shape` that lies inside an island of `size` devices: `tensor` as far
    as it fits, then `fsdp`; `data` takes what is left, and goes across."""
    _, fsdp, tensor = shape
    tensor_inside = gcd(tensor, size)
    fsdp_inside = gcd(fsdp, size // tensor_inside)
    return size // (tensor_inside * fsdp_inside), fsdp_inside, tensor_inside
