"""Devices that programs can be compiled for without having them."""

import os
from typing import Any

import jax
from jax.experimental import topologies

from configs.schema import UserError

# What XLA:GPU asks of the GPU that it compiles for: a GpuTargetConfigProto, as text.
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


def devices_of(topology: str) -> Any:
    """The chips of a TPU slice, or the GPUs of a machine, that need not be there; or the devices here."""
    if not topology:
        return jax.devices()
    # Before JAX first looks for devices: else it, and libtpu, would wait for a TPU.
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    name, _, count = topology.partition(":")
    try:
        if name == "h200":
            options = {"topology": f"1x1x{count}", "target_config": H200}  # slices x machines x GPUs of one
            return topologies.get_topology_desc(platform="cuda", topology_name="", **options).devices
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        raise UserError(f"--topology={topology}: {error}") from error
