"""Compare runs' measurements with their plans: --calibrate."""

import json
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from configs.command_line import config_from_json
from configs.schema import UserError, with_options
from hosts.machines import GIB, machine_of, name_of
from tools.plan.step_time import step_time
from tools.programs.topologies import Topology
from tools.report.runs import Run
from training.candidate import Candidate
from training.memory import device_bytes


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
    """Compare a run with its plan. If its batch grew, the last stage counts. Raise UserError if the run's machine is
    not described, or if it has not logged two steps yet."""
    devices, last_stage = run.record["devices"], run.ramp.stages[-1]
    machine = machine_of(devices["kind"])
    if machine is None:
        raise UserError(
            f"--calibrate={run.folder}: it ran on {devices['kind']}, which hosts/machines.toml does not describe"
        )
    config = config_from_json(json.dumps(run.record["config"]))
    config = with_options(config, {"batch.tokens_per_step": last_stage.tokens_per_step, "batch.ramp": ""})
    chips = devices["count"] // devices["slices"] // machine.per_chip
    candidate = Candidate(config, Topology(devices["slices"], machine.kind, (chips,)))
    course = run.course("tokens_per_second")
    rates = [rate for step, rate in zip(course.steps, course.values) if step > last_stage.step][1:]
    if not rates:
        raise UserError(f"--calibrate={run.folder}: it has not logged two steps yet; the first of them does not count")
    seconds, time = last_stage.tokens_per_step / median(rates), step_time(candidate)
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
