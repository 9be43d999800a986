"""Lines and facts that describe a run's start."""

from typing import Any

import jax
from jax.sharding import Mesh

from hosts.runtime import code_digest, versions
from model.gpt import parameter_counts
from model.kernels import attention_kernel, described, window_of
from model.parallel import compute_capability
from training.build import Build
from training.mesh import sizes_of


def made_with(mesh: Mesh) -> dict[str, Any]:
    """Return the facts of a start for its event: the code's hash, versions, devices, mesh."""
    devices = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {jax.process_count()} process(es)"
    return {"code_hash": code_digest(), "versions": versions(), "devices": devices, "mesh": sizes_of(mesh)}


def describe(built: Build) -> str:
    """Return lines for the run, the sizes of its step, and its kernel of attention."""
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    return (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps; a "
        f"step: {micro_batches} micro-batch(es) x {rows} rows x {length} tokens\n"
        f"{describe_attention(built)}"
    )


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    of_rows = (built.dtype.name, length, head_dim, documents)
    kernel = attention_kernel(device.platform, compute_capability(), *of_rows)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    suffix = f"; window of each block: {windows} (S short, L long)" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{suffix}"
