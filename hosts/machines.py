"""Describe devices: memory, peaks and links, from hosts/machines.toml. Without JAX."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from configs.schema import UserError

GPU_FRACTION = 0.92
"""Share of a GPU's memory that JAX takes at its start for all programs; CUDA, NCCL and cuDNN have the rest. Assumed."""
HEADROOM = 0.9
"""Share of a device's memory that a program may ask for: the allocator's gaps and the runtime have the rest."""
VECTOR_MEMORY = (
    "a kernel needs more than the vector memory (VMEM) of a TPU's core; what it needs follows from "
    "batch.sequence_length and model.head_dim: make one of them smaller. Fewer rows per device would not help"
)
"""The message for a program that `exceeds_vector_memory`."""
MACHINES = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True)
class Machine:
    """Describe one kind of device; the file says what each figure means."""

    kind: str
    """As topologies name it: `v5e`, `h200`."""
    device_kind: list[str]
    memory: int
    flops: float
    bandwidth: float
    links: float
    directions: int
    network: float
    source: str
    gpu: bool = False
    capability: float = 0.0
    vector: float = 0.0
    cores: int = 1
    per_chip: int = 1
    pod: int = 0

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


def machine_of(device_kind: str) -> Machine | None:
    """Return the machine of a `jax.Device.device_kind`, or None if none is described (every CPU)."""
    matches = [(len(part), m.kind) for m in machines().values() for part in m.device_kind if part in device_kind]
    return machines()[max(matches)[1]] if matches else None


def peak_flops(device_kind: str) -> float | None:
    """Return a device's peak bfloat16 FLOP/s, or None if it is not known."""
    machine = machine_of(device_kind)
    return machine.flops if machine else None


def exceeds_vector_memory(error: str) -> bool:
    """Return whether a TPU's compiler refused a program for a kernel that exceeds a core's vector memory. It gives the
    same status, RESOURCE_EXHAUSTED, if the device's memory is too small."""
    first, _, _ = error.partition("\n")
    return "RESOURCE_EXHAUSTED" in first and "vmem" in first.lower()
