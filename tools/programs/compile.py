"""Compile the training step ahead of time, from shapes alone; measure a program's memory, and which of its instructions
take the time."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from run.fitting import program_bytes
from tools.programs.hlo import read_program
from training.build import Build

CONTAINERS = ("while", "call", "conditional")  # their time is their instructions'


def compile_step(built: Build, **options: Any) -> Any:
    """Compile the training step for the build's mesh, whose devices need not be there. `options`: XLA's."""
    with jax.sharding.use_abstract_mesh(built.mesh.abstract_mesh):  # its devices decide the kernels
        return built.train_step.lower(built.abstract_state, built.abstract_batch()).compile(options)


TOP = 25  # rows of the table of instructions


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes on the first device, as it reports them or else by the program's own analysis."""
    measured = jax.local_devices()[0].memory_stats()
    return measured["peak_bytes_in_use"] if measured and "peak_bytes_in_use" in measured else program_bytes(compiled)


def top_operations(compiled: jax.stages.Compiled, run: Callable[[], Any], steps: int) -> str:
    """Return a table of the instructions that take most time, over `steps` calls of `run`, which runs the program and
    waits.

    Milliseconds a step are summed over the threads or devices of an instruction. Each row ends with its name in JAX.
    """
    program, _ = read_program(compiled.as_text() or "")
    known = {instruction.name: instruction for instructions in program.values() for instruction in instructions}
    nanoseconds, calls = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                run()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for event in (event for line in plane.lines for event in line.events):
                    # A GPU's events are kernels that name their instruction; a TPU's are complete lines of the program.
                    named = dict(event.stats).get("hlo_op", event.name) if "GPU" in plane.name else event.name
                    name = re.match(r"%?([\w.\-]*)", str(named))[1]  # pyright: ignore[reportOptionalSubscript]
                    if name in known and known[name].opcode not in CONTAINERS:
                        nanoseconds[name] += event.duration_ns
                        calls[name] += 1
    total = sum(nanoseconds.values())
    lines = [f"{'ms a step':>10}{'share':>8}{'calls':>8}  instruction, and its name in JAX; {steps} steps"]
    for name, time in nanoseconds.most_common(TOP):
        source = re.search(r'op_name="([^"]*)"', known[name].attributes)
        path = re.sub(r"\b(jit\(\w+\)|shard_map|while|body|\w+_call|eval_jaxpr)/", "", source[1] if source else "")
        lines.append(f"{time / steps / 1e6:10.2f}{time / total:8.1%}{calls[name] / steps:8.0f}  {name}  {path}")
    lines.append(f"{total / steps / 1e6:10.2f}  of all instructions")
    return "\n".join(lines)
