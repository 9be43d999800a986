"""Parse the hardware of a job: `v5e:4x4`, `2x v5e:4x4` (two slices), `64x h200:8` (64 nodes of eight GPUs)."""

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema import UserError
from tools.programs.topologies import parse_topology, shapes_of

CATALOG = Path(__file__).with_name("catalog.toml")


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
        """Return the hosts of a slice: four chips each, except slices of one or eight chips on one host (v5e, v6e)."""
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
        """Return this kind's entry in tools/launch/catalog.toml."""
        return catalog()[self.kind]

    def __str__(self) -> str:
        return f"{self.groups}x {self.kind}:{self.topology}" if self.groups > 1 else f"{self.kind}:{self.topology}"


@cache
def catalog() -> dict[str, dict[str, Any]]:
    """Read tools/launch/catalog.toml, which users edit. Raise UserError if it cannot be read."""
    try:
        return tomllib.loads(CATALOG.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{CATALOG}: {error}") from error


def parse_hardware(text: str) -> Hardware:
    """Return the hardware that `text` names. Raise UserError, with what would be right, for an unknown kind or size."""
    asked = parse_topology(text, "--hardware")
    hardware = Hardware(asked.kind, asked.slices, "x".join(map(str, asked.chips)))
    if asked.kind not in catalog():
        raise UserError(f'--hardware="{text}": {asked.kind} is unknown; {CATALOG} has {", ".join(catalog())}')
    most = hardware.facts.get("devices_per_host", 8)
    if "dimensions" in hardware.facts:
        right = shapes_of(asked, hardware.facts["dimensions"])
    else:
        fits = len(asked.chips) == 1 and asked.chips[0] <= most
        right = "" if fits else f"a number of devices of one node, 1 to {most}"
    if right:
        raise UserError(f'--hardware="{text}": a slice or node of {asked.kind} is {right}')
    return hardware
