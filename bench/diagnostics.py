"""What it costs that a step measures itself: python -m bench.diagnostics --config=configs/small.py

The plain step, the measuring one (training/diagnostics.py) and one with each option that has a cost of its own are
compiled for the same batch and take steps in turn: a JSON line has the medians of the ratios of neighbouring steps to
the plain one's, and the ratios of the programs' memory. With --topology they are compiled ahead of time, and in place
of the time stand the compiler's estimate of a TPU's cycles, or the bytes that a GPU's kernels read and write.
"""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from bench.measure import WARMUP_STEPS, Sizes, random_batch, sized
from configs.command_line import parse
from configs.schema import DiagnosticsConfig, Positive
from hosts.runtime import run_command
from tools.programs.compile import compile_step
from tools.programs.device_memory import GIB, program_bytes
from tools.programs.hlo import estimated_cycles, traffic
from tools.programs.topologies import devices_of
from training.build import build

MEASURED = {
    "measuring": DiagnosticsConfig(),
    "successive": DiagnosticsConfig(successive=True),
    "adam_metric": DiagnosticsConfig(adam_metric=True),
}
"""What a step measures, by the program's name."""


@dataclass(frozen=True)
class Arguments(Sizes):
    """Where, and in what size."""

    topology: str = ""
    """A TPU slice (`v5e:4x4`) or GPUs (`h200:1`). Empty: the devices here."""
    timed_steps: Positive[int] = 9
    """Steps of each program whose median is taken."""


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    devices = devices_of(arguments.topology)
    config = sized(config, arguments, len(devices))
    built = build(config, devices)
    programs = {"plain": compile_step(built)}
    for name, diagnostics in MEASURED.items():
        measuring = build(replace(config, diagnostics=diagnostics), devices).measuring_step
        programs[name] = compile_step(built._replace(train_step=measuring))
    found: dict[str, Any] = {"config": config.name, "micro_batches": built.batch_shape[0], "jax": jax.__version__}
    if arguments.topology:
        gpu = built.mesh.devices.flat[0].platform == "gpu"
        cost = {name: (traffic if gpu else estimated_cycles)(program.as_text()) for name, program in programs.items()}
        found |= {"topology": arguments.topology, "bytes" if gpu else "cycles": cost, "cost": ratios(cost)}
    else:
        seconds = [ratios(step) for step in in_turn(built, programs, arguments.timed_steps)]
        medians = {name: statistics.median(step[name] for step in seconds) for name in MEASURED}
        found |= {"device": devices[0].device_kind, "cost": medians}
    memory = {name: program_bytes(program) / GIB for name, program in programs.items()}
    print(json.dumps(found | {"gib": memory, "memory": ratios(memory)}))
    return 0


def ratios(of: Mapping[str, float]) -> dict[str, float]:
    """Of each program that measures, to the plain one."""
    return {name: of[name] / of["plain"] for name in MEASURED}


def in_turn(built: Any, programs: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """Seconds of a step of each program, step by step, from one state on."""
    state, batch, seconds = built.create_state(), random_batch(built), []
    for _ in range(WARMUP_STEPS + steps):
        seconds.append({})
        for name, program in programs.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, batch))
            seconds[-1][name] = time.perf_counter() - start
    return seconds[WARMUP_STEPS:]


if __name__ == "__main__":
    run_command(main)
