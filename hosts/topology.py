"""TPU slices, or machines with GPUs, as commands name them."""

from math import prod
from typing import NamedTuple

from hosts.machines import machines


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
