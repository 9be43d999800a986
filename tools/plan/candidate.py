"""A config on a topology: one candidate of a plan."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod

from configs.schema import Config, UserError
from hosts.machines import Machine, machines
from model.axes import DATA
from model.shapes import Parameter, kinds
from tools.programs.topologies import Topology, parse_topology, shapes_of
from training.layout import AXES, data_parts, inside, mesh_shape, place, step_shape

GIB = 2**30


@dataclass(frozen=True)
class Candidate:
    """A config with its mesh, rows, recomputation and chunks, on a topology. Its properties raise UserError if sizes do
    not divide."""

    config: Config
    topology: Topology

    @property
    def machine(self) -> Machine:
        return machines()[self.topology.kind]

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
        parts = zip(DATA, data_parts(self.sizes["data"], self.across["data"]))
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
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on a device."""
        return self.step[1] * self.step[2]

    @property
    def bytes_of_type(self) -> int:
        """Return the bytes of a number in the compute type."""
        return 4 if self.config.model.dtype == "float32" else 2

    @cached_property
    def kinds(self) -> tuple[tuple[Parameter, int], ...]:
        """Return the parameters, equal shapes once, with their number."""
        return kinds(self.config.model)

    def options(self) -> dict[str, int | str]:
        """Return what a search chooses, by the options' names."""
        mesh, model = self.config.mesh, self.config.model
        return {
            "mesh.data": mesh.data,
            "mesh.fsdp": mesh.fsdp,
            "mesh.tensor": mesh.tensor,
            "batch.rows_per_device": self.config.batch.rows_per_device,
            "model.remat": model.remat,
            "model.loss_chunks": model.loss_chunks,
        }

    def changed(self, fsdp: int, tensor: int, rows: int, remat: str, chunks: int) -> "Candidate":
        """Return the same run with other choices."""
        config = self.config
        return Candidate(
            replace(
                config,
                mesh=replace(config.mesh, data=-1, fsdp=fsdp, tensor=tensor),
                batch=replace(config.batch, rows_per_device=rows),
                model=replace(config.model, remat=remat, loss_chunks=chunks),  # pyright: ignore[reportArgumentType]
            ),
            self.topology,
        )


@cache  # a search asks of each mesh with many rows
def share_of(shape: tuple[int, ...], axes: tuple[str | None, ...], sizes: tuple[tuple[str, int], ...]) -> int:
    """Return how many numbers of an array a device has on a mesh of these `sizes`, padding included."""
    mesh = dict(sizes)
    layout = place(shape, axes, mesh)
    return prod(layout.stored) // prod(mesh[name] for names in layout.spec for name in names)


def known_topology(text: str) -> Topology:
    """Parse a topology. Raise UserError for kinds that hosts/machines.toml does not describe, and impossible shapes."""
    topology = parse_topology(text)
    if topology.kind not in machines():
        known = ", ".join(machines())
        raise UserError(
            f"--topology={text}: hosts/machines.toml does not describe {topology.kind}; it has {known}; add yours to it"
        )
    machine = machines()[topology.kind]
    if not machine.gpu and (right := shapes_of(topology, machine.directions // 2)):
        raise UserError(f"--topology={text}: a slice of {topology.kind} is {right}")
    if machine.pod and prod(topology.chips) > machine.pod:
        raise UserError(
            f"--topology={text}: a pod of {topology.kind} has {machine.pod:,} chips; take several slices: "
            f"'2x {topology.kind}:...'"
        )
    return topology


def name_of(topology: Topology) -> str:
    """Return the topology as a user types it."""
    slices = f"{topology.slices}x " if topology.slices > 1 else ""
    return f"{slices}{topology.kind}:{'x'.join(map(str, topology.chips))}"
