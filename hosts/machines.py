"""Return what devices can do: their peak FLOP/s, and the memory that programs may take. Without JAX."""

import re
import tomllib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from system.errors import UserError

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


@cache
def peak_flops(device_kind: str) -> float | None:
    """Return the peak bfloat16 FLOP/s of a `jax.Device.device_kind` by hosts/machines.toml, which users edit; None if
    it does not describe the device. Raise UserError if it cannot be read."""
    try:
        tables = tomllib.loads(MACHINES.read_text()).values()
        patterns = {pattern: table["flops"] for table in tables for pattern in table["device_kind"]}
        matches = [pattern for pattern in patterns if re.search(pattern, device_kind)]
    except (OSError, ValueError, KeyError, re.error) as error:
        raise UserError(f"{MACHINES}: {error}") from error
    return patterns[max(matches, key=len)] if matches else None


def exceeds_vector_memory(error: str) -> bool:
    """Return whether a TPU's compiler refused a program for a kernel that exceeds a core's vector memory. It gives the
    same status, RESOURCE_EXHAUSTED, if the device's memory is too small."""
    first, _, _ = error.partition("\n")
    return "RESOURCE_EXHAUSTED" in first and "vmem" in first.lower()


def is_lack_of_memory(error: str) -> bool:
    """Return whether an error is of a device with too little memory. gRPC, through which the processes exchange values,
    has the same status for a message or a rate of requests that it refuses."""
    return "RESOURCE_EXHAUSTED" in error and not re.search("grpc|message larger than max", error, re.IGNORECASE)


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
