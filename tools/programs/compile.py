"""Compile the training step ahead of time, from shapes alone, and read the memory that a program asks for."""

from typing import Any

import jax

from run.fitting import program_bytes
from training.build import Build


def compile_step(built: Build, **options: Any) -> Any:
    """Compile the training step for the build's mesh, whose devices need not be there. `options`: XLA's."""
    with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):  # its devices decide the kernels
        return built.train_step.lower(built.abstract_state, built.abstract_batch()).compile(options)


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes on the first device, as it reports them or else by the program's own analysis."""
    measured = jax.local_devices()[0].memory_stats()
    return measured["peak_bytes_in_use"] if measured and "peak_bytes_in_use" in measured else program_bytes(compiled)
