"""Devices, and who holds what.

A replica (one position of the `data` axis) computes its rows of every micro-batch. Parameters and optimizer state are
divided over the replicas too (ZeRO stage 1, arXiv:1910.02054): each leaf along its longest dimension that divides.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.schema import BatchConfig, MeshConfig, UserError

REPLICATED = -1


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axis `data` over all devices (or those given). UserError where they are not that many."""
    devices = jax.devices() if devices is None else devices
    data = len(devices) if config.data == -1 else config.data
    if data != len(devices):
        raise UserError(
            f"--mesh.data={config.data} does not fit the {len(devices)} {devices[0].platform} device(s) here; "
            f"use {len(devices)}, or -1 for all of them"
        )
    return Mesh(np.asarray(devices).reshape(data), ("data",))


def batch_shape(config: BatchConfig, mesh: Mesh) -> tuple[int, int, int]:
    """`(K, B, T)` of a step's arrays: K micro-batches of B rows (over the whole mesh) of T tokens.

    UserError, with the sizes that would work, where the step's rows do not divide.
    """
    replicas = mesh.shape["data"]
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
    """Arrays [K, B, T]: rows over the replicas."""
    return NamedSharding(mesh, PartitionSpec(None, "data"))


def shard_axis(shape: tuple[int, ...], replicas: int) -> int:
    """The dimension along which a parameter is divided over the replicas, or REPLICATED where none divides."""
    divisible = [axis for axis, size in enumerate(shape) if size % replicas == 0]
    return max(divisible, key=lambda axis: shape[axis], default=REPLICATED)


def shard_spec(shape: tuple[int, ...], replicas: int) -> PartitionSpec:
    """`shard_axis` as a PartitionSpec."""
    axis = shard_axis(shape, replicas)
    return PartitionSpec() if axis == REPLICATED else PartitionSpec(*[None] * axis, "data")
