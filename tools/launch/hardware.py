"""What a job runs on, as it is written: `v5e:4x4`, `2x v5e:4x4` (two slices), `64x h200:8` (64 nodes of eight GPUs)."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema import UserError
from tools.programs.topologies import parse_topology, shapes_of

MACHINES = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True)
class Hardware:
    """Slices of a TPU, or nodes with GPUs or CPUs."""

    kind: str
    """A name of tools/launch/catalog.toml."""
    groups: int
    """TPU slices, or nodes."""
    topology: str
    """Chips of a slice (`4x4`), or devices of a node (`8`)."""

    @property
    def is_tpu(self) -> bool:
        return "x" in self.topology

    @property
    def devices_per_group(self) -> int:
        return math.prod(map(int, self.topology.split("x")))

    @property
    def hosts_per_group(self) -> int:
        """A TPU host has four chips, but for slices of one chip or of eight that are one host (v5e, v6e)."""
        if not self.is_tpu or self.devices_per_group <= 4 or self.topology == "2x4":
            return 1
        return self.devices_per_group // 4

    @property
    def hosts(self) -> int:
        return self.groups * self.hosts_per_group

    @property
    def devices_per_host(self) -> int:
        return self.devices_per_group // self.hosts_per_group

    @property
    def devices(self) -> int:
        return self.groups * self.devices_per_group

    @property
    def facts(self) -> dict[str, Any]:
        """What tools/launch/catalog.toml says of this kind."""
        return machines()[self.kind]

    def __str__(self) -> str:
        return f"{self.groups}x {self.kind}:{self.topology}" if self.groups > 1 else f"{self.kind}:{self.topology}"


@cache
def machines() -> dict[str, dict[str, Any]]:
    """tools/launch/catalog.toml, which users edit. UserError where it cannot be read."""
    try:
        return tomllib.loads(MACHINES.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{MACHINES}: {error}") from error


def parse_hardware(text: str) -> Hardware:
    """UserError, with what would be right, for a kind or a size that there is not."""
    asked = parse_topology(text, "--hardware")
    groups, kind, topology = asked.slices, asked.kind, "x".join(map(str, asked.chips))
    if kind not in machines():
        raise UserError(f'--hardware="{text}": {kind} is unknown; {MACHINES} has {", ".join(machines())}')
    dimensions = machines()[kind].get("dimensions", 1)
    if dimensions > 1:
        right = shapes_of(asked, dimensions)
    else:
        most = machines()[kind].get("devices_per_host", 8)
        fits = "x" not in topology and int(topology) <= most
        right = "" if fits else f"a number of devices of one node, 1 to {most}"
    if right:
        raise UserError(f'--hardware="{text}": a slice or node of {kind} is {right}')
    return Hardware(kind, groups, topology)
