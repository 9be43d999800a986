"""The memory that programs may take on the devices that are here."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

CGROUPS, OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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
