"""Memory of a step on a device: what a run stores, from shapes, and what its program adds, linear in the rows."""

from collections.abc import Mapping
from math import ceil, prod
from typing import Any

import jax

from training.build import Build
from training.layout import step_shape
from training.mesh import batch_devices, parameter_layouts, sizes_of

SMALLER = {"model.loss_chunks": 8, "model.remat": "block"}
"""Options that take less memory and more time."""


def device_bytes(tree: Any) -> int:
    """Return the bytes that one device stores of a tree of abstract arrays."""
    return sum(leaf.dtype.itemsize * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def stored_bytes(built: Build) -> dict[str, int]:
    """Return the bytes on a device that follow from shapes alone, by part, while a run trains."""
    state, mesh, batch = built.abstract_state, built.mesh, device_bytes(built.abstract_batch())
    layouts = jax.tree.leaves(parameter_layouts(built.config.model, mesh))
    summed = sum(prod(p.shape) // prod(mesh.shape[axis] for axis in p.axes if axis) for p in layouts)
    return {
        "parameters": device_bytes(state.params),
        "moments": device_bytes(state.opt_state),
        "gradients": 4 * summed,  # float32 sums of a replica
        "batch": batch,
        "held-out rows": ceil(built.config.eval.tokens / prod(built.batch_shape)) * batch,
    }


def program_bytes(compiled: Any) -> int:
    """Return the bytes on a device that a compiled program asks for, by its own analysis: arguments, results,
    temporaries."""
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that replace them count once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes


def row_counts(built: Build) -> list[int]:
    """Return the rows_per_device that divide the step, the most first."""
    config, replicas = built.config.batch, batch_devices(built.mesh)
    micro_batches, rows, _ = step_shape(config, sizes_of(built.mesh))
    share = micro_batches * rows // replicas
    return [n for n in range(share, 0, -1) if share % n == 0]


def line(points: Mapping[int, float | int], x: int) -> float:
    """Return the value at `x` of the line through the outermost of the points; of one point, its value."""
    low, high = min(points), max(points)
    slope = (points[high] - points[low]) / (high - low) if high > low else 0.0
    return float(points[low] + slope * (x - low))
