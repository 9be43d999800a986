"""The mesh of devices, and how it divides arrays.

    data     replicas: rows are divided over them, and once a step gradients are summed over them
             (three axes of the mesh, `options.schema.DATA_AXES`: between slices or nodes, and two inside one)
    fsdp     rows are divided over it too, and the parameters' width
    tensor   heads, MLP width and vocabulary are divided over it

Parameters and optimizer state are also divided over `data` (ZeRO stage 1, arXiv:1910.02054), whatever their sizes
(training/shares.py). Complete replicas exist only within a step, in the compute type.

`data` spans several TPU slices or GPU nodes. `fsdp` and `tensor` stay inside one, on its fast links, as far as they
fit.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import gcd, isqrt, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from options.schema import BATCH_AXES, DATA_AXES, BatchConfig, MeshConfig
from system.errors import UserError

AXES = ("data", "fsdp", "tensor")
"""The axes that a user names."""
ROWS = PartitionSpec(None, BATCH_AXES)
"""Arrays [K, B, T]: the rows of each micro-batch over replicas and `fsdp`."""


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of all devices (or those given), in their interconnect's order. Raise UserError if it does not
    fit."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices), f"{len(devices)} {devices[0].platform} device(s) here")
    groups = device_groups(devices)
    if len(groups) == 1:
        across, ordered = 1, jax.make_mesh(shape, AXES, (AxisType.Auto,) * 3, devices=devices).devices
    else:
        across, ordered = shape[0] // inside(shape, len(groups[0]))[0], arrange(shape, groups)
    parts = data_parts(shape[0], across)
    return Mesh(ordered.reshape(*parts, *shape[1:]), (*DATA_AXES, *AXES[1:]), axis_types=(AxisType.Auto,) * 5)


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


def data_parts(data: int, across: int) -> tuple[int, int, int]:
    """Return the sizes of the axes `DATA_AXES`, whose product is `data`: `across` slices or nodes, and the rest as two
    factors as equal as possible, which two dimensions of a matrix can share."""
    within = data // across
    minor = max(size for size in range(1, isqrt(within) + 1) if within % size == 0)
    return across, within // minor, minor


def sizes_of(mesh: Mesh) -> dict[str, int]:
    """Return the sizes of `data`, `fsdp` and `tensor`, as a user names them."""
    return {"data": prod(mesh.shape[axis] for axis in DATA_AXES)} | {axis: mesh.shape[axis] for axis in AXES[1:]}


def device_groups(devices: Sequence[Any]) -> list[list[Any]]:
    """Return the devices in groups that fast links join: by `slice_index`, which numbers TPU slices, and GPU nodes or
    NVLink domains; by process on CPUs, which have none, and for GPUs described without hardware, whose `slice_index` is
    0 on every node. Described TPUs of one slice have none either, and are one group."""
    tells = all(hasattr(device, "slice_index") for device in devices)
    if devices[0].platform == "tpu" and not tells:
        return [list(devices)]
    if devices[0].platform == "gpu" and all(device.local_hardware_id is None for device in devices):
        tells = False
    groups = defaultdict(list)
    for device in devices:
        groups[device.slice_index if tells else device.process_index].append(device)
    return [groups[index] for index in sorted(groups)]


def arrange(shape: tuple[int, int, int], groups: Sequence[Sequence[Any]]) -> np.ndarray:
    """Return the devices of several groups as an array [data, fsdp, tensor] of `shape`: `tensor` inside a group as far
    as it fits, then `fsdp`; `data` takes the rest, and crosses groups. Raise UserError if groups differ in size."""
    sizes = {len(group) for group in groups}
    if len(sizes) > 1:
        raise UserError(f"the {len(groups)} slices or nodes have {sorted(sizes)} devices; a mesh needs equal numbers")
    within = inside(shape, sizes.pop())
    # Numbered as create_hybrid_device_mesh expects them, whatever identified the groups.
    by_process = len({getattr(group[0], "slice_index", None) for group in groups}) == 1
    return mesh_utils.create_hybrid_device_mesh(
        within,
        tuple(whole // part for whole, part in zip(shape, within)),
        [device for group in groups for device in group],
        process_is_granule=by_process,
        allow_split_physical_axes=groups[0][0].device_kind in ("TPU v5 lite", "TPU v5e"),  # as in jax.make_mesh
    )


def inside(shape: tuple[int, int, int], size: int) -> tuple[int, int, int]:
    """Return the part of a mesh [data, fsdp, tensor] of `shape` inside a group of `size` devices: `tensor` as far as
    it fits, then `fsdp`; `data` takes the rest, and crosses device groups."""
    _, fsdp, tensor = shape
    tensor_inside = gcd(tensor, size)
    fsdp_inside = gcd(fsdp, size // tensor_inside)
    return size // (tensor_inside * fsdp_inside), fsdp_inside, tensor_inside


def batch_devices(mesh: Mesh) -> int:
    """Return the number of devices that divide the rows of a batch."""
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


def axes_between(mesh: Mesh) -> list[str]:
    """Return the axes along which neighbours are in different device groups, with slower links."""
    groups = device_groups(list(mesh.devices.flat))
    group_of = {device: i for i, group in enumerate(groups) for device in group}
    index = np.vectorize(group_of.__getitem__, otypes=[int])(mesh.devices)
    index = index.reshape(list(sizes_of(mesh).values()))
    return [name for axis, name in enumerate(AXES) if np.ptp(index, axis).any()]


def xla_options(mesh: Mesh, deterministic: bool = True) -> dict[str, bool]:
    """Return options of XLA that differ from its defaults, by platform.

    On a GPU: round to bfloat16 as the network asks. By default XLA drops such roundings, and keeps and reads float32
    copies of activations: 7 of 24 GiB, and 125 of 894 GB per step, at depth 12 (bench/LOG.md). With `deterministic`,
    also avoid kernels whose result may differ between executions, cuDNN's backward attention among them, and choose
    kernels without timing them, so that another compilation gives the same bits (openxla.org/xla/determinism). Matrix
    products are cuBLAS's, not Triton's, as in MaxText: cuBLAS adds residuals and takes relu in the product, and its
    kernels need no GPU to be chosen, so a program that is compiled elsewhere (tools/programs) is the one that runs.
    docs/checkpoints.md has the guarantees on other platforms.
    """
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    return {
        "xla_allow_excess_precision": False,
        "xla_gpu_exclude_nondeterministic_ops": deterministic,
        "xla_gpu_enable_triton_gemm": False,
    }


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


def batch_shape(config: BatchConfig, mesh: Mesh) -> tuple[int, int, int]:
    """Return `(K, B, T)` of a step's arrays (`step_shape`)."""
    return step_shape(config, sizes_of(mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch's arrays [K, B, T]."""
    return NamedSharding(mesh, ROWS)


def resized(x: Any, shape: Sequence[int]) -> Any:
    """Return the array `x`, cut or padded with zeros at the end of each dimension to `shape`."""
    if x.shape == tuple(shape):
        return x
    x = x[tuple(map(slice, shape))]
    return jnp.pad(x, [(0, size - length) for size, length in zip(shape, x.shape)])


def mesh_of_first(config: MeshConfig) -> Mesh:
    """Return a mesh of as many of the devices here as it needs. Raise UserError if there are too few."""
    count = config.data * config.fsdp * config.tensor
    return make_mesh(config, jax.devices()[:count] if count > 0 else None)
