"""Speed and memory of one step against the rows of its micro-batches: a JSON line for each, and a plot.

python -m bench.micro_batches --config=configs/small.py --rows 1 2 4 8 16 --out=micro-batches.png

The step stays the config's, or is one micro-batch where that is more; fewer rows are more micro-batches. With
--topology it is compiled ahead of time for a TPU slice: nothing is run, and the compiler's estimate of its cycles (as
in bench.collectives) stands for the time.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
from matplotlib.figure import Figure

from bench.measure import Sizes, measure, sized
from configs.command_line import parse
from configs.schema import FilePath, Positive, UserError
from hosts.runtime import run_command
from tools.programs.compile import compile_step
from tools.programs.device_memory import peak_memory_bytes
from tools.programs.hlo import estimated_cycles
from tools.programs.topologies import devices_of
from training.build import build


@dataclass(frozen=True)
class Arguments:
    """What is varied, and where."""

    rows: tuple[Positive[int], ...] = (1, 2, 4, 8, 16)
    """Rows of a micro-batch on one device."""
    topology: str = ""
    """A TPU slice, as `v5e:4x4`, or several, as `2x v5e:4x4`. Empty: the devices here."""
    timed_steps: Positive[int] = 9
    """Steps whose median is taken."""
    out: FilePath = "micro-batches.png"
    """The plot."""


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    if not arguments.rows:
        raise UserError("--rows is given without a number; leave it out for 1 2 4 8 16")
    devices = devices_of(arguments.topology)
    if arguments.topology and devices[0].platform != "tpu":
        raise UserError(f"--topology={arguments.topology}: only a TPU's compiler estimates cycles; as v5e:4x4")
    points = []
    for rows in arguments.rows:
        of_rows = sized(config, Sizes(rows=rows), len(devices))
        if arguments.topology:
            built = build(of_rows, devices)
            compiled = compile_step(built)
            speed = of_rows.batch.tokens_per_step / estimated_cycles(compiled.as_text()) * 1e6
            point = {"micro_batches": built.batch_shape[0], "tokens_per_million_cycles": round(speed, 1)}
            point["peak_gib"] = round(peak_memory_bytes(compiled) / 2**30, 2)
        else:
            measured = measure(of_rows, arguments.timed_steps)
            point = {name: measured[name] for name in ("micro_batches", "tokens_per_second", "peak_gib")}
        points.append({"rows": rows, **point})
        print(json.dumps(points[-1]), flush=True)

    plot(points, f"{config.name}, {arguments.topology or jax.devices()[0].device_kind}", Path(arguments.out))
    return 0


def plot(points: list[dict], title: str, out: Path) -> None:
    """Speed and memory, side by side."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2), list(points[0])[2:]):
        axis.plot([point["rows"] for point in points], [point[name] for point in points], "o-")
        axis.set_xscale("log", base=2)
        axis.set_xticks([point["rows"] for point in points], [str(point["rows"]) for point in points])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("rows of a micro-batch on a device")
        axis.set_ylabel({"peak_gib": "GiB on a device"}.get(name, name.replace("_", " ")))
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    run_command(main)
