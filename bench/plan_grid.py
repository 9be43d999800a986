"""The planner's model held against compiled programs: compiles a grid of steps, and compares.

python -m bench.plan_grid                        # compiles what is not yet on record, a line of JSON a program
python -m bench.plan_grid --no_compile           # the table of predictions, errors and order alone
python -m bench.plan_grid --only=h200            # the points whose words have this in them

The record goes on where it was interrupted. Programs are compiled ahead of time (EXTRA=tpu,gpu-programs); nothing is
run. bench/plan_points.txt lists the points, and which of them were in view when the rules of tools/plan/memory.py and
tools/plan/step_time.py were chosen: the errors that count are those of the others.
"""

import contextlib
import json
import shlex
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Sizes, sized
from configs.command_line import parse, parse_arguments
from configs.schema import Config, FilePath
from hosts.runtime import run_command
from tools.plan.candidate import Candidate, known_topology
from tools.plan.memory import memory
from tools.plan.step_time import step_time
from tools.programs.device_memory import GIB

POINTS = Path(__file__).with_name("plan_points.txt")
RECORD = Path(__file__).with_name("plan_grid.jsonl")


@dataclass(frozen=True)
class Arguments:
    """Which points, and where their programs are on record."""

    record: FilePath = str(RECORD)
    """Lines of JSON, one a program that was compiled; more are added at its end."""
    compile: bool = True
    """Compile the points that are not on record. False: what is on record alone."""
    only: str = ""
    """Points with this in their words."""
    out: FilePath = ""
    """A picture of predicted against compiled. Empty: none."""


def points(only: str) -> list[tuple[bool, str]]:
    """(whether it is for fitting, its words: a topology and the options of a command), of bench/plan_points.txt."""
    lines = [line.split("#")[0].strip() for line in POINTS.read_text().splitlines()]
    return [(line[0] == "f", line[2:].strip()) for line in lines if line and only in line]


def config_of(words: str, devices: int) -> Config:
    """The config of a point."""
    config, sizes = parse(None, Sizes, shlex.split(words)[1:])
    return sized(config, sizes, devices)


def compile_point(words: str) -> dict[str, Any]:
    """What the compiled program of a point says of itself."""
    import jax

    from tools.programs.compile import compile_step
    from tools.programs.hlo import estimated_cycles, traffic
    from tools.programs.hlo_collectives import collectives
    from tools.programs.topologies import devices_of
    from training.build import build
    from training.mesh import sizes_of

    devices = devices_of(shlex.split(words)[0])
    built = build(config_of(words, len(devices)), devices)
    start = time.process_time()
    compiled = compile_step(built)
    seconds = time.process_time() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for c in collectives(text, sizes_of(built.mesh)):
        total = sums[c.kind, c.dtype, "+".join(c.axes), "loop" if c.in_loop else "once"]
        total[0] += c.times
        total[1] += c.times * c.bytes_each
    return {
        "point": words,
        "jax": jax.__version__,
        "compiler": f"libtpu {version('libtpu')}" if devices[0].platform == "tpu" else f"jaxlib {version('jaxlib')}",
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "cycles": estimated_cycles(text),
        "traffic": traffic(text),
        "collectives": [[*key, *value] for key, value in sums.items()],
        "processor_seconds": round(seconds, 1),
    }


def compared(words: str, program: dict[str, Any]) -> dict[str, float]:
    """The closed form's bytes and cycles of a point, and the program's. Where what was read of a program leaves its
    arguments out, the closed form's count of them stands on both sides."""
    of = candidate_of(words)
    parts, time = memory(of), step_time(of)
    arguments = parts["parameters"] + parts["moments"] + parts["batch"]
    size = (
        program.get("total") or program.get("arguments", arguments) + program.get("outputs", 0) + program["temporaries"]
    )
    clock = of.machine.vector / 1024 / of.machine.cores
    cycles = (time.products + time.passes) * clock
    found = {"predicted_bytes": sum(parts.values()), "program_bytes": size, "error": sum(parts.values()) / size - 1}
    if program.get("cycles"):
        found |= {"predicted_cycles": cycles, "program_cycles": program["cycles"]}
    return found


def candidate_of(words: str) -> Candidate:
    topology = known_topology(shlex.split(words)[0])
    with contextlib.redirect_stdout(None):  # what follows from a depth
        return Candidate(config_of(words, topology.devices), topology)


def held(found: list[tuple[bool, dict[str, float]]]) -> str:
    """In a sentence, what the closed form was held against and how wrong it was."""
    parts = []
    for fitted, name in ((True, "in view when its rules were chosen"), (False, "held out")):
        errors = [100 * each["error"] for fits, each in found if fits == fitted]
        middle = f"{np.median(np.abs(errors)):.1f}% off at the median, " if errors else ""
        range_of = f" ({middle}{min(errors):+.1f}% to {max(errors):+.1f}%)" if errors else ""
        parts.append(f"{len(errors)} {name}{range_of}")
    return (
        f"the closed form's memory was held against {len(found)} compiled programs so far: {', '.join(parts)}; its "
        "seconds against none that ran (docs/planning.md)"
    )


def order(found: list[dict[str, float]]) -> float:
    """Spearman's rank correlation of predicted and XLA's cycles."""
    ranks = lambda of: np.argsort(np.argsort([each[of] for each in found]))
    return float(np.corrcoef(ranks("predicted_cycles"), ranks("program_cycles"))[0, 1])


def report(found: dict[str, tuple[bool, dict[str, float]]]) -> None:
    """Prints the table, and what it comes to."""
    for words, (fitted, of) in found.items():
        predicted, program = of.get("predicted_cycles", 0) / 1e6, of.get("program_cycles", 0) / 1e6
        cycles = f"{predicted:8.1f}{program:8.1f} M cycles" if program else ""
        print(
            f"{'fit' if fitted else 'out':4}{of['predicted_bytes'] / GIB:8.3f}{of['program_bytes'] / GIB:8.3f} GiB"
            f"{of['error']:+8.1%}{cycles:25}  {words}"
        )
    fit = {words for words, (fits, _) in found.items() if fits}
    for name, chosen in (("fit", fit), ("held out", found.keys() - fit)):
        errors = np.abs([found[words][1]["error"] for words in chosen])
        if len(errors):
            middle, high = np.percentile(errors, (50, 95))
            print(
                f"{name}: {len(errors)} programs, memory {middle:.1%} off at the median, {high:.1%} at the 95th "
                f"percentile, {max(errors):.1%} at most"
            )
    for machine in ("v5e", "v5p", "v6e"):
        timed = [of for words, (_, of) in found.items() if "program_cycles" in of and f"{machine}:" in words]
        if len(timed) > 2:
            print(f"{machine}: order by cycles, Spearman {order(timed):.3f} of {len(timed)}")
    print(held(list(found.values())))


def plot(found: dict[str, tuple[bool, dict[str, float]]], path: str) -> None:
    """Predicted against compiled: memory, and cycles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    label_of_cycles = "million cycles, without attention and collectives"
    names = (("bytes", GIB, "GiB of a device", 1), ("cycles", 1e6, label_of_cycles, 100))
    for axes, (name, unit, label, middle) in zip(figure.subplots(1, 2), names):
        for machine, marker in (("v5e", "o"), ("v5p", "s"), ("v6e", "^"), ("h200", "D")):
            for fitted, colour in ((True, "C0"), (False, "C1")):
                of_kind = [of for words, (fits, of) in found.items() if fits == fitted and f"{machine}:" in words]
                shown = [of for of in of_kind if f"program_{name}" in of]
                x, y = ([of[f"{which}_{name}"] / unit for of in shown] for which in ("program", "predicted"))
                what = f"{machine}, {'in view' if fitted else 'held out'} ({len(shown)})"
                axes.scatter(x, y, s=22, color=colour, marker=marker, label=what if shown else None)
        axes.axline((middle, middle), slope=1, color="grey", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=f"program: {label}", ylabel="closed form")
        axes.xaxis.set_minor_formatter("")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    path, listed = Path(arguments.record), points(arguments.only)
    known = record(path)
    for words in [words for _, words in listed if arguments.compile and words not in known]:
        print(words, file=sys.stderr, flush=True)
        known[words] = compile_point(words)
        with path.open("a") as file:
            file.write(json.dumps(known[words]) + "\n")
    found = {words: (fitted, compared(words, known[words])) for fitted, words in listed if words in known}
    report(found)
    if arguments.out:
        plot(found, arguments.out)
    return 0


def record(path: Path) -> dict[str, dict[str, Any]]:
    """What was read of each point's program."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {point["point"]: point for point in map(json.loads, lines)}


if __name__ == "__main__":
    run_command(main)
