"""Parse topologies, and describe their devices to XLA, so that programs compile for devices that are not here."""

import os
import re
from math import prod
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from hosts.topology import Machine, Topology, machines
from model import parallel
from system.errors import UserError

CORES = {
    7.5: (64, 1024, 64),
    8.0: (64, 2048, 164),
    8.6: (128, 1536, 100),
    8.9: (128, 1536, 100),
    9.0: (128, 2048, 228),
    10.0: (128, 2048, 228),
    12.0: (128, 1536, 100),
}
"""For each compute capability that CUDA 13 compiles for: a multiprocessor's float32 units, threads, and KiB of shared
memory (docs.nvidia.com: CUDA C++ programming guide, technical specifications)."""


COUNTED = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1}
"""What Google's names of slices count of a chip: v4-8 and v5p-8 have 8 cores, v5e-8 and v6e-8 have 8 chips."""


def parse_topology(text: str) -> Topology:
    """Parse `v5e:4x4`, `2x v5e:4x4`, `h200:8`, `64x h200:8`. Raise UserError for others, for kinds that
    hosts/machines.toml does not describe, and for slices that are larger than a pod."""
    form = re.fullmatch(r"(?:([1-9]\d*)x\s*)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)", text.strip().lower())
    if form is None:
        right = "a TPU slice (v5e:4x4, v5p:4x4x4), GPUs of a machine (h200:8), or several of them ('2x v5e:4x4')"
        meant = f"; did you mean {name}?" if (name := named_by_clouds(text)) else ""
        raise UserError(f"--topology={text}: give {right}{meant}")
    topology = Topology(int(form[1] or 1), form[2], tuple(map(int, form[3].split("x"))))
    kind, known = topology.kind, machines()
    if kind not in known:
        hint = f"it has {', '.join(known)}; add yours to it"
        raise UserError(f"--topology={text}: hosts/machines.toml does not describe {kind}; {hint}")
    dimensions = 1 if topology.is_gpu else known[kind].directions // 2
    if len(topology.chips) != dimensions:
        raise UserError(f"--topology={text}: {kind} takes {dimensions} number(s), as h200:8, v5e:4x4 or v5p:4x4x4 do")
    if known[kind].pod and prod(topology.chips) > known[kind].pod:
        several = f"take several slices: '2x {kind}:...'"
        raise UserError(f"--topology={text}: a pod of {kind} has {known[kind].pod:,} chips; {several}")
    return topology


def named_by_clouds(text: str) -> str:
    """Return the topology that clouds name by its kind and size (`v5e-8`, `v5p-8`, `h100-8`); empty for other texts."""
    form = re.fullmatch(r"([a-z]\w*)-([1-9]\d*)", text.strip().lower())
    machine = machines().get(form[1]) if form else None
    if form is None or machine is None or not (machine.gpu or machine.kind in COUNTED):
        return ""
    if machine.gpu:
        return f"{machine.kind}:{form[2]}"
    chips, sides = int(form[2]) // COUNTED[machine.kind], [1] * (machine.directions // 2)
    while prod(sides) < chips:
        sides[sides.index(min(sides))] *= 2
    ones_last = sorted(sides, key=lambda side: (side == 1, side))
    return f"{machine.kind}:{'x'.join(map(str, ones_last))}" if prod(sides) == chips else ""


def target_config(machine: Machine) -> str:
    """Return what XLA:GPU needs to know about the GPU that it compiles for: a GpuTargetConfigProto, as text."""
    units, threads, shared = CORES[machine.capability]
    major, minor = str(machine.capability).split(".")
    own = 1 if machine.capability >= 8 else 0  # KiB of a block's shared memory that CUDA takes
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {machine.multiprocessors}
  fpus_per_core: {units}
  clock_rate_ghz: {machine.clock / 1e9}
  device_memory_size: {machine.memory}
  memory_bandwidth: {machine.bandwidth:.0f}
  l2_cache_size: {machine.l2}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {(shared - own) * 1024}
  shared_memory_per_core: {shared * 1024}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {machine.device_kind[0].removesuffix("$")}"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
"""


def devices_of(topology: str) -> Any:
    """Return the devices of a topology, which need not be there, or the devices here if it is empty. Raise UserError
    for a topology that does not exist."""
    if not topology:
        return jax.devices()
    slices, kind, chips = asked = parse_topology(topology)
    # Before JAX first looks for devices: otherwise JAX and libtpu would wait for a TPU.
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    try:
        if asked.is_gpu:
            machine = machines()[kind]
            if machine.capability not in CORES:
                raise ValueError(f"CUDA 13 compiles for compute capability 7.5 and later, not {machine.capability}")
            # JAX asks only for these before a program runs: cuDNN's version, and the compute capability. So do we.
            fused_attention_stablehlo.check_cudnn_version = lambda: 91200
            fused_attention_stablehlo.check_compute_capability = lambda least: float(least) <= machine.capability
            parallel.described_capability = machine.capability
            shape = f"{slices}x1x{chips[0]}"  # slices x machines x GPUs of one
            options = {"topology": shape, "target_config": target_config(machine)}
            return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        name, several = f"{kind}:{'x'.join(map(str, chips))}", {"num_slices": slices} if slices > 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices
    except Exception as error:
        raise UserError(f"--topology={topology}: {error} (the compilers: make setup EXTRA=tpu,gpu-programs)") from error
