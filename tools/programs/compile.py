"""Compile the training step ahead of time, from shapes alone, and read the memory that a program asks for."""

from typing import Any

import jax

from training.build import Build

GIB = 2**30


def compile_step(built: Build, **options: Any) -> Any:
    """Compile the training step for the build's mesh, whose devices need not be there. `options`: XLA's."""
    with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):  # its devices decide the kernels
        return built.train_step.lower(built.abstract_state, built.abstract_batch()).compile(options)


def program_bytes(compiled: Any) -> int:
    """Return the bytes on a device that a compiled program asks for, by its own analysis: arguments, results,
    temporaries."""
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that replace them count once.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes on the first device, as it reports them or else by the program's own analysis."""
    measured = jax.local_devices()[0].memory_stats()
    return measured["peak_bytes_in_use"] if measured and "peak_bytes_in_use" in measured else program_bytes(compiled)


def device_bytes(device: Any, devices_here: int) -> int:
    """Return the bytes that programs may take on a device that is here. Devices that do not report it (CPUs) share the
    memory that the machine has available now (proc(5), MemAvailable)."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024 // devices_here
