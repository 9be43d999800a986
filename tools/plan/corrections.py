"""Correct the closed form: by compiled programs (--compile), and by runs (--calibrate).

Each candidate is compiled in its own process: Ctrl-C ends that at once, which XLA's compiler would not allow.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import NamedTuple

from configs.command_line import config_from_json
from configs.schema import UserError
from hosts.machines import GIB, HEADROOM, VECTOR_MEMORY, exceeds_vector_memory, machine_of, name_of
from tools.plan.search import Row
from tools.plan.step_time import step_time
from tools.programs.topologies import CORES, Topology
from tools.report import Run
from training.candidate import Candidate
from training.memory import device_bytes


def corrected(rows: list[Row], most: int) -> list[Row]:
    """Return the rows, the best `most` that should fit with their programs' memory. Rows that fit come first, of these
    the compiled ones. If one does not fit, the next is compiled instead, once. GPUs that CUDA 13 does not compile for
    keep the closed form's."""
    machine = rows[0].candidate.machine
    if machine.gpu and machine.capability not in CORES:
        return rows
    compiled_rows, spare = list(rows), most
    for i, row in enumerate(rows):
        if not row.fits or most == 0:
            break
        compiled_rows[i] = replace(row, compiled=_compiled_bytes(row))
        most -= 1
        if not compiled_rows[i].fits and spare:
            most, spare = most + 1, spare - 1
    return sorted(compiled_rows, key=lambda row: (not row.fits, row.compiled is None, row.time.expected))


def _compiled_bytes(row: Row) -> int:
    candidate = row.candidate
    options = " ".join(f"{name}={value}" for name, value in candidate.options().items())
    print(f"compiling {name_of(candidate.topology)}, {options} ...", end=" ", file=sys.stderr, flush=True)
    request = json.dumps({"config": asdict(candidate.config), "topology": name_of(candidate.topology)})
    start = time.monotonic()
    # subprocess.run ends the child if it is interrupted.
    child = subprocess.run(
        [sys.executable, "-m", "tools.plan.corrections"], input=request.encode(), capture_output=True
    )
    seconds = time.monotonic() - start
    if child.returncode == 0:
        size = json.loads(child.stdout.splitlines()[-1])
        print(f"{size / GIB:.2f} GiB, {size / sum(row.parts.values()) - 1:+.1%} ({seconds:.0f} s)", file=sys.stderr)
        return size
    log = child.stderr.decode(errors="replace")
    if exceeds_vector_memory(next((line for line in log.splitlines() if "RESOURCE_EXHAUSTED" in line), "")):
        raise UserError(f"--compile: {VECTOR_MEMORY}")
    if "RESOURCE_EXHAUSTED" not in log:
        problem = ["it ended without a message", *re.findall(r"^[\w.]*(?:Error|Exception): .*", log, re.MULTILINE)][-1]
        raise UserError(f"--compile: compiling for {name_of(candidate.topology)} failed: {problem}")
    print(f"more than the device has ({seconds:.0f} s)", file=sys.stderr)  # a TPU's compiler refuses it
    return int(candidate.machine.for_programs / HEADROOM) + 1


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    from run.fitting import program_bytes
    from tools.programs.compiled import compile_step
    from tools.programs.topologies import devices_of
    from training.build import build

    asked = json.loads(sys.stdin.read())
    built = build(config_from_json(json.dumps(asked["config"])), devices_of(asked["topology"]))
    print(program_bytes(compile_step(built)))


class Measured(NamedTuple):
    """A run's measurements on a machine, relative to the plan for the same run."""

    machine: str
    seconds: float
    """Ratio of step times: the median of logged steps over the middle of the bracket."""
    bytes: float
    """Peak memory of a device, evaluation and sampling included, over the closed form's; 1 if the device does not
    report it."""
    words: str
    """A sentence with measured and planned figures."""


def measured(run: Run) -> Measured:
    """Compare a run with its plan. Raise UserError if the run's machine is
    not described, or if it has not logged two steps yet."""
    devices = run.record["devices"]
    machine = machine_of(devices["kind"])
    if machine is None:
        raise UserError(
            f"--calibrate={run.folder}: it ran on {devices['kind']}, which hosts/machines.toml does not describe"
        )
    config = config_from_json(json.dumps(run.record["config"]))
    chips = devices["count"] // devices["slices"] // machine.per_chip
    candidate = Candidate(config, Topology(devices["slices"], machine.kind, (chips,)))
    course = run.course("tokens_per_second")
    rates = course.values[1:]
    if not rates:
        raise UserError(f"--calibrate={run.folder}: it has not logged two steps yet; the first of them does not count")
    seconds, time = config.batch.tokens_per_step / median(rates), step_time(candidate)
    words = (
        f"{run.folder}, {name_of(candidate.topology)}: a step takes {seconds:.3g} s, planned {time.fast:.3g} to "
        f"{time.slow:.3g} (middle {time.expected:.3g}, {time.expected / seconds - 1:+.1%})"
    )
    planned, used = device_bytes(candidate), max(run.course("peak_memory_bytes").values, default=0)
    if used:
        words += f"; a device used {used / GIB:.3g} GiB, planned {planned / GIB:.3g} ({planned / used - 1:+.1%})"
    return Measured(machine.kind, seconds / time.expected, used / planned if used else 1.0, words)


def factors(runs: Sequence[Measured], machine: str) -> tuple[float, float]:
    """Return measured over planned seconds and bytes: the medians of a machine's runs, or 1 if it has none."""
    own = [run for run in runs if run.machine == machine] or [Measured(machine, 1.0, 1.0, "")]
    return median(run.seconds for run in own), median(run.bytes for run in own)


if __name__ == "__main__":
    _main()
