"""The type of a network's activations: as configured, or the faster one on the devices here."""

from pathlib import Path

import jax
import jax.numpy as jnp

from model.kernels import has_bfloat16
from model.parallel import compute_capability
from options.schema import ModelConfig

CPUINFO = Path("/proc/cpuinfo")
PRODUCTS = {"amx_bf16", "avx512_bf16"}
"""Features of a processor with which products of bfloat16 were measured to be faster (docs/performance.md)."""


def compute_dtype(config: ModelConfig, platform: str) -> jnp.dtype:
    """Return the type of activations: as configured, otherwise that of `fastest_dtype`."""
    return jnp.dtype(fastest_dtype(platform)[0] if config.dtype == "auto" else config.dtype)


def fastest_dtype(platform: str) -> tuple[str, str]:
    """Return the type of activations that `model.dtype=auto` stands for on a platform's devices here, and why."""
    if platform != "cpu":
        if has_bfloat16(platform, compute_capability()):
            return "bfloat16", f"a {platform.upper()} multiplies bfloat16"
        return "float32", "GPUs before Ampere have no bfloat16"
    if jax.__version_info__ < (0, 12):
        return "float32", "on a CPU, JAX before 0.12 is no faster in bfloat16"
    if found := processor_flags() & PRODUCTS:
        return "bfloat16", f"the processor has {' and '.join(sorted(found))}"
    return "float32", f"the processor has no {' or '.join(sorted(PRODUCTS))}"


def processor_flags() -> set[str]:
    """Return the features of this machine's first processor; none where Linux does not list them (macOS, ARM)."""
    if not CPUINFO.exists():
        return set()
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    return next((set(flags.split()) for name, _, flags in lines if name.strip() == "flags"), set())
