"""What devices are: memory, peaks and links, of program/machines.toml. Without JAX."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from configs.schema import UserError

HEADROOM = 0.9
"""Of a device's memory, that a program may ask for: the allocator's gaps and the runtime have the rest."""
MACHINES = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True)
class Machine:
    """A device of some kind; the file says what each figure means."""

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
    vector: float = 0.0
    cores: int = 1


@cache
def machines() -> dict[str, Machine]:
    """Those of program/machines.toml, which users edit. UserError where it cannot be read."""
    try:
        tables = tomllib.loads(MACHINES.read_text())
        return {kind: Machine(kind, **table) for kind, table in tables.items()}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{MACHINES}: {error}") from error


def machine_of(device_kind: str) -> Machine | None:
    """The machine of a `jax.Device.device_kind`, or None where none is described (every CPU)."""
    matches = [(len(part), m.kind) for m in machines().values() for part in m.device_kind if part in device_kind]
    return machines()[max(matches)[1]] if matches else None


def peak_flops(device_kind: str) -> float | None:
    """Its peak bfloat16 FLOP/s, or None where it is not known."""
    machine = machine_of(device_kind)
    return machine.flops if machine else None
