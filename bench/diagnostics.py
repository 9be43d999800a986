"""What it costs that a step measures itself: python -m bench.diagnostics --config=configs/small.py

The plain step and the measuring one (training/diagnostics.py) are compiled for the same batch and take steps in turn: a
JSON line has the median of the ratios of neighbouring steps, and the ratio of the programs' memory. With --topology
both are compiled ahead of time for a TPU slice, and the compiler's estimate of their cycles stands for the time.
"""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax

from bench.measure import WARMUP_STEPS, Sizes, random_batch, sized
from configs.command_line import parse
from configs.schema import Positive
from program.compile import compile_step
from program.hlo import estimated_cycles
from program.memory import peak_memory_bytes
from program.topologies import devices_of
from run.runtime import run_command
from training.build import build


@dataclass(frozen=True)
class Arguments(Sizes):
    """Where, and in what size."""

    topology: str = ""
    """A TPU slice, as `v5e:4x4`. Empty: the devices here."""
    timed_steps: Positive[int] = 9
    """Steps of each program whose median is taken."""


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    devices = devices_of(arguments.topology)
    built = build(sized(config, arguments, len(devices)), devices)
    programs = {
        "plain": compile_step(built),
        "measuring": compile_step(built._replace(train_step=built.measuring_step)),
    }
    found: dict[str, Any] = {"config": config.name, "micro_batches": built.batch_shape[0], "jax": jax.__version__}
    if arguments.topology:
        cost = {name: estimated_cycles(program.as_text()) for name, program in programs.items()}
        found |= {"topology": arguments.topology, "cycles": cost, "cost": cost["measuring"] / cost["plain"]}
    else:
        ratios = [step["measuring"] / step["plain"] for step in in_turn(built, programs, arguments.timed_steps)]
        found |= {"device": devices[0].device_kind, "cost": statistics.median(ratios)}
    memory = {name: peak_memory_bytes(program) / 2**30 for name, program in programs.items()}
    print(json.dumps(found | {"gib": memory, "memory": memory["measuring"] / memory["plain"]}))
    return 0


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
