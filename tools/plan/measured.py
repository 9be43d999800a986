"""Runs beside what would have been planned for them: for tools.plan --calibrate, and for a step that does not fit."""

import json
from statistics import median
from typing import NamedTuple

from configs.command_line import config_from_json
from configs.ramp import Ramp
from configs.schema import Config, UserError, with_options
from hosts.machines import machine_of
from tools.plan.candidate import Candidate, name_of
from tools.plan.evaluation_memory import device_bytes
from tools.plan.search import Given, nearest_change, row_of
from tools.plan.step_time import step_time
from tools.programs.topologies import Topology
from tools.report.runs import Run

GIB = 2**30


class Measured(NamedTuple):
    """What a run measured on a machine, over what is planned for the same run."""

    machine: str
    seconds: float
    """Of a step, its median over the logged ones, over the middle of the bracket."""
    bytes: float
    """The most that a device held, evaluation and sampling included, over the closed form's; 1 where the device does
    not tell."""
    words: str
    """For a person: measured and predicted."""


def candidate_of(config: Config, device_kind: str, devices: int, slices: int) -> Candidate | None:
    """A run's config on the devices that it has, with the last of its stages for a batch that does not grow; None where
    no machine is described of that kind."""
    machine, last = machine_of(device_kind), Ramp.of(config.batch).stages[-1]
    config = with_options(config, {"batch.tokens_per_step": last.tokens_per_step, "batch.ramp": ""})
    return Candidate(config, Topology(slices, machine.kind, (devices // slices,))) if machine else None


def measured(run: Run) -> Measured:
    """UserError where the run's machine is not described, or it has not logged two steps yet."""
    devices, config = run.record["devices"], config_from_json(json.dumps(run.record["config"]))
    # Of versions that did not say how many slices or nodes, a run of one.
    of = candidate_of(config, devices["kind"], devices["count"], devices.get("slices", 1))
    if of is None:
        raise UserError(
            f"--calibrate={run.folder}: it ran on {devices['kind']}, which hosts/machines.toml does not describe"
        )
    last_stage = run.ramp.stages[-1]
    course = run.course("tokens_per_second")
    rates = [rate for step, rate in zip(course.steps, course.values) if step > last_stage.step][1:]
    if not rates:
        raise UserError(f"--calibrate={run.folder}: it has not logged two steps yet, of which the second is measured")
    seconds, time = last_stage.tokens_per_step / median(rates), step_time(of)
    words = (
        f"{run.folder}, {name_of(of.topology)}: a step takes {seconds:.3g} s, planned were {time.fast:.3g} to "
        f"{time.slow:.3g} (middle {time.expected:.3g}, {time.expected / seconds - 1:+.1%})"
    )
    planned, held = device_bytes(of), run.course("peak_memory_bytes").values
    if held:
        words += (
            f"; a device held {max(held) / GIB:.3g} GiB, planned were {planned / GIB:.3g} "
            f"({planned / max(held) - 1:+.1%})"
        )
    return Measured(of.machine.kind, seconds / time.expected, max(held) / planned if held else 1.0, words)


def of_machines(found: list[Measured]) -> dict[str, Measured]:
    """By machine, the medians of its runs."""
    return {
        kind: Measured(
            kind,
            median(of.seconds for of in found if of.machine == kind),
            median(of.bytes for of in found if of.machine == kind),
            "",
        )
        for kind in {of.machine for of in found}
    }


def does_not_fit(config: Config, device_kind: str, devices: int, slices: int) -> str:
    """What a step that asked for more than a device's memory would have held, by part, and the nearest change that
    would fit, by the closed form."""
    of = candidate_of(config, device_kind, devices, slices)
    if of is None:
        return f"the step needs more memory than a {device_kind} has; what it would hold is not known of this device"
    # It asked for more than the memory, whatever the closed form says.
    too_little = max(1.0, of.machine.memory / device_bytes(of))
    row = row_of(of, Given(bytes=too_little))
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in row.parts.items() if size > 0.005 * row.bytes)
    change = nearest_change(row)
    nearest = f"{change[0]} would fit ({change[1].bytes / GIB:.2f} GiB)" if change else "nothing would fit"
    return (
        f"the step needs more memory than the {of.machine.memory / GIB:.3g} GiB of a {device_kind}. As tools.plan "
        f"counts, GiB: {parts}, {row.bytes / GIB:.2f} in all; {nearest}"
    )
