"""Describe devices: memory, peaks and links, from hosts/machines.toml, and the memory of those here. Without JAX."""

import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from configs.schema import UserError

GIB = 2**30
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
CGROUPS, OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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


def machine_of(device_kind: str) -> Machine | None:
    """Return the machine of a `jax.Device.device_kind`, or None if none is described (every CPU)."""
    matches = [
        (len(part), m.kind) for m in machines().values() for part in m.device_kind if re.search(part, device_kind)
    ]
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


def device_limit(device: Any, devices_here: int) -> int:
    """Return the bytes that programs may take on a device that is here. Devices that do not report it (CPUs) share what
    the machine has available now, within the limit of this process's container."""
    if reported := (device.memory_stats() or {}).get("bytes_limit"):
        return reported
    available = min(psutil.virtual_memory().available, cgroup_limit() - psutil.Process().memory_info().rss)
    return available // devices_here


def cgroup_limit() -> int:
    """Return the least limit, in bytes, of this process's control group (a container's, a job's) and those around it,
    in version 2 or 1 (cgroups(7)); more than any machine has without one."""
    limits = [2**63]
    for line in OF_PROCESS.read_text().splitlines() if OF_PROCESS.exists() else ():  # only Linux has it
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            top = CGROUPS / controllers
            for folder in (top / path[1:], *(top / path[1:]).parents):
                with suppress(OSError, ValueError):  # none, or `max`; a container may not see the groups around it
                    limits.append(int((folder / name).read_text()))
    return min(limits)
