"""Describe machines that need not be here: the figures of hosts/machines.toml, and topologies as commands name them."""

import tomllib
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from hosts.machines import GPU_FRACTION, MACHINES
from system.errors import UserError


@dataclass(frozen=True)
class Machine:
    """Describe one kind of device: a field for each figure of machines.toml, which says what it means."""

    kind: str
    """As topologies name it: `v5e`, `h200`."""
    device_kind: list[str]
    memory: int
    flops: float
    bandwidth: float
    directions: int
    source: str
    gpu: bool = False
    capability: float = 0.0
    float32: float = 0.0
    multiprocessors: int = 0
    clock: float = 0.0
    l2: int = 0
    per_chip: int = 1
    pod: int = 0

    def peak(self, dtype: str) -> float:
        """Return FLOP/s of matrix products in a compute type. A TPU multiplies float32 in six passes of bfloat16."""
        return self.flops if dtype != "float32" else self.float32 or self.flops / 6

    @property
    def for_programs(self) -> int:
        """Return the bytes that JAX has for programs, as a present device reports them (`bytes_limit`)."""
        return int(self.memory * GPU_FRACTION) if self.gpu else self.memory


@cache
def machines() -> dict[str, Machine]:
    """Return the machines of hosts/machines.toml, which users edit. Raise UserError if it cannot be read."""
    try:
        tables = tomllib.loads(MACHINES.read_text())
        return {kind: Machine(kind, **table) for kind, table in tables.items()}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{MACHINES}: {error}") from error


class Topology(NamedTuple):
    """Slices of chips, or machines with GPUs, as a command names them."""

    slices: int
    """Number of TPU slices, or GPU machines."""
    kind: str
    """`v5e`, `v5p`, `v6e`, ...; `h200`."""
    chips: tuple[int, ...]
    """A slice's chips in each direction; or (GPUs of one machine,)."""

    @property
    def is_gpu(self) -> bool:
        """Return whether `chips` are GPUs."""
        return self.kind in machines() and machines()[self.kind].gpu

    @property
    def chips_inside(self) -> int:
        """Return the number of a slice's chips, or of a machine's GPUs."""
        return prod(self.chips)

    @property
    def inside(self) -> int:
        """Return the number of a slice's JAX devices, or of a machine's GPUs."""
        return self.chips_inside * (machines()[self.kind].per_chip if self.kind in machines() else 1)

    @property
    def devices(self) -> int:
        """Return the number of devices of all slices, or machines."""
        return self.slices * self.inside


def name_of(topology: Topology) -> str:
    """Return the topology as a user types it."""
    slices = f"{topology.slices}x " if topology.slices > 1 else ""
    return f"{slices}{topology.kind}:{'x'.join(map(str, topology.chips))}"
