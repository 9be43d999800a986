"""Devices, and who holds what.

    data     replicas: rows are divided over them, and once a step gradients are summed over them
    fsdp     rows are divided over it too, and the parameters' width
    tensor   heads, MLP width and vocabulary are divided over it

Parameters and optimizer state are divided over `data` besides (ZeRO stage 1, arXiv:1910.02054): whole replicas exist
only within a step, in the compute type.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from configs.schema import BatchConfig, MeshConfig, UserError
from model.parallel import Axes

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(None, ("data", "fsdp"))
"""Arrays [K, B, T]: the rows of each micro-batch over replicas and `fsdp`."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all devices (or those given), in their interconnect's order. UserError where it does not fit."""
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data * inner != len(devices):
        fits = (
            f"{len(devices) // inner} or -1" if len(devices) % inner == 0 else "-1, and fsdp x tensor that divide them"
        )
        raise UserError(
            f"--mesh.data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not fit the {len(devices)} "
            f"{devices[0].platform} device(s) here; use --mesh.data={fits}"
        )
    return jax.make_mesh((data, config.fsdp, config.tensor), AXES, (AxisType.Auto,) * 3, devices=devices)


def xla_options(mesh: Mesh) -> dict[str, bool]:
    """Options of XLA that differ from its defaults, by platform: only what a measurement showed to help (bench/LOG.md).

    On a GPU: to round to bfloat16 where the network says so. Left to itself XLA drops such roundings, and so keeps and
    reads float32 copies of activations: 7 of 24 GiB, and 125 of 894 GB a step, at depth 12.
    """
    return {"xla_allow_excess_precision": False} if mesh.devices.flat[0].platform == "gpu" else {}


def batch_shape(config: BatchConfig, mesh: Mesh) -> tuple[int, int, int]:
    """`(K, B, T)` of a step's arrays: K micro-batches of B rows (over the whole mesh) of T tokens.

    UserError, with the sizes that would work, where the step's rows do not divide.
    """
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    rows, unit = config.tokens_per_step // config.sequence_length, config.sequence_length * replicas
    here = config.rows_per_device
    shares = [n for n in range(1, rows // replicas + here + 1) if n <= here or n % here == 0]
    below = [n * unit for n in shares if n * replicas <= rows][-1:]
    above = [n * unit for n in shares if n * replicas > rows][:1]
    works = " or ".join(map(str, below + above))
    if rows % replicas:
        raise UserError(
            f"--batch.tokens_per_step={config.tokens_per_step} is {rows} rows of {config.sequence_length} tokens, "
            f"which {replicas} devices cannot share evenly; nearest that would work: {works}"
        )
    share = rows // replicas
    here = min(here, share)
    if share % here:
        raise UserError(
            f"--batch.rows_per_device={config.rows_per_device} does not divide the {share} rows a step that each of "
            f"{replicas} device(s) gets from --batch.tokens_per_step={config.tokens_per_step}; "
            f"rows_per_device that would work: {[n for n in range(1, share + 1) if share % n == 0]}; "
            f"or tokens_per_step: {works}"
        )
    return share // here, here * replicas, config.sequence_length


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where a batch's arrays [K, B, T] lie."""
    return NamedSharding(mesh, ROWS)


def parameter_spec(shape: tuple[int, ...], axes: Axes, mesh: Mesh) -> PartitionSpec:
    """Where a parameter lies: over the axes it names, and over `data` besides, along the longest dimension that still
    divides; without one, it is whole on every replica."""
    sizes = [size // (mesh.shape[axis] if axis else 1) for size, axis in zip(shape, axes)]
    divisible = [i for i, size in enumerate(sizes) if size % mesh.shape["data"] == 0]
    spec: list = list(axes)
    if divisible:
        longest = max(divisible, key=lambda i: sizes[i])
        spec[longest] = (axes[longest], "data") if axes[longest] else "data"
    return PartitionSpec(*spec)


def dimension_over(spec: PartitionSpec, axis: str) -> int | None:
    """The dimension that a mesh axis divides, if it divides one."""
    return next((i for i, names in enumerate(spec) if axis == names or axis in (names or ())), None)
