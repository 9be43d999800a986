"""A config on a topology: one candidate of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

from configs.schema import DATA_AXES, Config, options, with_options
from hosts.machines import UNKNOWN, Machine, Topology, machine_of, machines, name_of
from model.gpt import Parameter, kinds
from model.kernels import has_bfloat16
from training.layout import AXES, data_parts, inside, mesh_shape, place, step_shape
from training.mesh import islands
from training.state import compute_dtype

REMAT = ("none", "products", "block")
"""Each computes more again than the one before."""
CHUNKS = 8
"""Chunks of the loss that are tried as well as 1."""
CHOICES = "mesh.data", "mesh.fsdp", "mesh.tensor", "batch.rows_per_device", "model.remat", "model.loss_chunks"
"""The options that a search chooses."""


@dataclass(frozen=True)
class Candidate:
    """A config with its mesh, rows, recomputation and chunks, on a topology. Its properties raise UserError if sizes do
    not divide."""

    config: Config
    topology: Topology

    @property
    def machine(self) -> Machine:
        return machines().get(self.topology.kind, UNKNOWN)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the mesh's axes. Raise UserError if they do not fit the devices."""
        devices = self.topology.devices
        return dict(zip(AXES, mesh_shape(self.config.mesh, devices, f"{devices} devices of {name_of(self.topology)}")))

    @cached_property
    def across(self) -> dict[str, int]:
        """Return how many slices or nodes each axis spans."""
        shape = self.sizes["data"], self.sizes["fsdp"], self.sizes["tensor"]
        within = inside(shape, self.topology.inside) if self.topology.slices > 1 else shape
        return {axis: whole // part for axis, whole, part in zip(AXES, shape, within)}

    def share(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> int:
        """Return how many numbers of a parameter or moment a device has between steps, padding included."""
        parts = zip(DATA_AXES, data_parts(self.sizes["data"], self.across["data"]))
        return share_of(shape, axes, tuple({**self.sizes, **dict(parts)}.items()))

    @property
    def scatters_by_sums(self) -> bool:
        """Return whether XLA:TPU makes all-reduces of the reduce-scatters over `fsdp`, which send twice as much: it
        does if `fsdp` is all of a single slice. Seen in programs for 8 to 128 chips, but not for v5e:4x8, for 4 chips,
        or on two slices (docs/planning.md)."""
        return not self.machine.gpu and self.topology.slices == 1 and 4 < self.sizes["fsdp"] == self.topology.devices

    @property
    def gathers_by_sums(self) -> bool:
        """Return whether it makes all-reduces of all-gathers, too. Seen for 64 and 128 chips, not for 8, 16 and 32."""
        return self.scatters_by_sums and self.sizes["fsdp"] >= 64

    @cached_property
    def step(self) -> tuple[int, int, int]:
        """Return (K, b, T): micro-batches, rows of one on one device, tokens of a row."""
        micro_batches, rows, length = step_shape(self.config.batch, self.sizes)
        return micro_batches, rows // (self.sizes["data"] * self.sizes["fsdp"]), length

    @property
    def row_counts(self) -> list[int]:
        """Return the rows_per_device that divide a step, the most first."""
        replicas = self.sizes["data"] * self.sizes["fsdp"]
        share = step_shape(replace(self.config.batch, rows_per_device="auto"), self.sizes)[1] // replicas
        return [n for n in range(share, 0, -1) if share % n == 0]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a device."""
        return self.step[1] * self.step[2]

    @property
    def dtype(self) -> str:
        """Return the compute type, `auto` resolved."""
        auto = "bfloat16" if has_bfloat16("gpu" if self.machine.gpu else "tpu", self.machine.capability) else "float32"
        return auto if self.config.model.dtype == "auto" else self.config.model.dtype

    @property
    def bytes_of_type(self) -> int:
        """Return the bytes of a number in the compute type."""
        return 4 if self.dtype == "float32" else 2

    @cached_property
    def kinds(self) -> tuple[tuple[Parameter, int], ...]:
        """Return the parameters, equal shapes once, with their number."""
        return kinds(self.config.model)

    def options(self) -> dict[str, Any]:
        """Return what a search chooses, by the options' names."""
        values = options(self.config)
        return {name: values[name] for name in CHOICES}

    def having(self, options: Mapping[str, Any]) -> "Candidate":
        """Return the same run with other options."""
        return Candidate(with_options(self.config, options), self.topology)

    def changed(self, fsdp: int, tensor: int, rows: int, remat: str, chunks: int) -> "Candidate":
        """Return the same run with other choices."""
        mesh = {"mesh.data": -1, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
        return self.having(mesh | {"batch.rows_per_device": rows, "model.remat": remat, "model.loss_chunks": chunks})


def candidate_of(config: Config, devices: Sequence[Any]) -> Candidate:
    """Return a config on devices that are here."""
    dtype = compute_dtype(config.model, devices[0].platform).name
    return Candidate(with_options(config, {"model.dtype": dtype}), topology_of(devices))


def topology_of(devices: Sequence[Any]) -> Topology:
    """Return the topology of devices that are here. Its kind is the platform's name if no machine is described."""
    machine, groups = machine_of(devices[0].device_kind), islands(devices)
    shape = [len(groups[0])]
    if machine and not machine.gpu:
        shape = [len({*along}) for along in zip(*(device.coords for device in groups[0]))][: machine.directions // 2]
    return Topology(len(groups), machine.kind if machine else devices[0].platform, tuple(shape))


@cache  # a search asks of each mesh with many rows
def share_of(shape: tuple[int, ...], axes: tuple[str | None, ...], sizes: tuple[tuple[str, int], ...]) -> int:
    """Return how many numbers of an array a device has on a mesh of these `sizes`, padding included."""
    mesh = dict(sizes)
    layout = place(shape, axes, mesh)
    return prod(layout.stored) // prod(mesh[name] for names in layout.spec for name in names)
