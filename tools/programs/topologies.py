"""Parse topologies, and describe their devices to XLA, so that programs compile for devices that are not here."""

import os
import re
from math import prod
from typing import Any

from configs.schema import UserError
from hosts.machines import Topology, machines

TWO_DIMENSIONS = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # beyond these, every side is a multiple of four
# What XLA:GPU needs to know about the GPU that it compiles for: a GpuTargetConfigProto, as text.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
"""


def parse_topology(text: str, option: str = "--topology") -> Topology:
    """Parse `v5e:4x4`, `2x v5e:4x4`, `h200:8`, `64x h200:8`. Raise UserError, which names the `option`, for others."""
    words = _of_google(text.strip().lower())
    form = re.fullmatch(r"(?:([1-9]\d*)x\s*)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)", words)
    if form is None:
        raise UserError(
            f"{option}={text}: give a TPU slice (v5e:4x4, v5p:4x4x4), GPUs of a machine (h200:8), or several of them "
            "('2x v5e:4x4', '64x h200:8'); Google Cloud's names (v6e-8) work, too"
        )
    topology = Topology(int(form[1] or 1), form[2], tuple(map(int, form[3].split("x"))))
    if topology.is_gpu and len(topology.chips) > 1:
        raise UserError(f"{option}={text}: give the GPUs of a machine as one number, as h200:8")
    return topology


def _of_google(text: str) -> str:
    """Return `v5p-128`, an accelerator type of Google Cloud, as `v5p:4x4x4`, and other text unchanged."""
    named = re.fullmatch(r"((?:[1-9]\d*x\s*)?)(v4|v5p|v5e|v5litepod|v6e)-([1-9]\d*)", text)
    if named is None:
        return text
    kind = "v5e" if named[2] == "v5litepod" else named[2]
    machine = machines()[kind]
    chips, dimensions = int(named[3]) // machine.cores, machine.directions // 2
    log = chips.bit_length() - 1
    if int(named[3]) != machine.cores << log:
        return text
    sides = [2 ** ((log + i) // dimensions) for i in range(dimensions)]
    if chips == 4 and dimensions == 3:
        sides = [2, 2, 1]
    return f"{named[1]}{kind}:{'x'.join(map(str, sides))}"


def shapes_of(topology: Topology, dimensions: int) -> str:
    """Return the shapes that a TPU's slice may have, or nothing if `topology` has one of them."""
    shape = "x".join(map(str, topology.chips))
    if dimensions == 2:
        return "" if shape in TWO_DIMENSIONS else ", ".join(TWO_DIMENSIONS)
    sides = topology.chips
    cube = len(sides) == 3 and list(sides) == sorted(sides) and all(side % 4 == 0 for side in sides)
    return "" if cube or shape in SMALL_CUBES else f"{', '.join(SMALL_CUBES)}, or rising multiples of 4 (4x4x8)"


def known_topology(text: str) -> Topology:
    """Parse a topology. Raise UserError for kinds that hosts/machines.toml does not describe, and impossible shapes."""
    topology = parse_topology(text)
    if topology.kind not in machines():
        known = ", ".join(machines())
        raise UserError(
            f"--topology={text}: hosts/machines.toml does not describe {topology.kind}; it has {known}; add yours to it"
        )
    machine = machines()[topology.kind]
    if not machine.gpu and (right := shapes_of(topology, machine.directions // 2)):
        raise UserError(f"--topology={text}: a slice of {topology.kind} is {right}")
    if machine.pod and prod(topology.chips) > machine.pod:
        raise UserError(
            f"--topology={text}: a pod of {topology.kind} has {machine.pod:,} chips; take several slices: "
            f"'2x {topology.kind}:...'"
        )
    return topology


def devices_of(topology: str) -> Any:
    """Return the devices of a topology, which need not be there, or the devices here if it is empty. Raise UserError
    for a topology that does not exist."""
    import jax  # here: `python -m tools.launch` reads topologies on machines without JAX
    from jax._src.cudnn import fused_attention_stablehlo
    from jax.experimental import topologies

    if not topology:
        return jax.devices()
    slices, kind, chips = asked = parse_topology(topology)
    # Before JAX first looks for devices: otherwise JAX and libtpu would wait for a TPU.
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    try:
        if asked.is_gpu:
            if kind != "h200":
                raise ValueError("h200 is the only GPU that can be compiled for without having it")
            # JAX asks only for these before a program runs: cuDNN's version, and the compute capability of H200.
            fused_attention_stablehlo.check_cudnn_version = lambda: 91200
            fused_attention_stablehlo.check_compute_capability = lambda least: float(least) <= 9.0
            options = {"topology": f"{slices}x1x{chips[0]}", "target_config": H200}  # slices x machines x GPUs of one
            return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        name, several = f"{kind}:{'x'.join(map(str, chips))}", {"num_slices": slices} if slices > 1 else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **several).devices
    except Exception as error:
        raise UserError(f"--topology={topology}: {error}") from error
