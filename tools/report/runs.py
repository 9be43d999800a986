"""Read runs' records from their folders: facts for sentences (tools/report/sentences.py) and plots
(tools/report/page.py).

It needs only config.json, metrics.jsonl, events.jsonl and summary.json, so that a laptop can show what a pod trained.
It needs no JAX, and no text, checkpoints or devices of the run. A plot lacks what no line has.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from configs.command_line import config_from_json
from configs.ramp import Ramp
from configs.schema import UserError
from run.goodput import goodput
from run.lines import Events, read_metrics
from run.record import at_hand, place

AXES = {"tokens": "tokens", "step": "steps", "seconds": "seconds of training"}


class Course(NamedTuple):
    """Values at steps, in the order of the steps."""

    steps: list[int]
    values: list[float]


class Spike(NamedTuple):
    """A step whose loss jumped."""

    step: int
    loss: float | None
    median: float | None
    """Median loss of the steps before."""
    batch: int | None
    texts: list[str]
    """Beginnings of the step's rows; a rollback has none."""
    rolled_back: bool
    """True if the run returned to the checkpoint of `step`, and skipped the batches up to the jump."""


@dataclass(frozen=True)
class Run:
    """A run, as its folder records it."""

    name: str
    folder: str
    options: dict[str, Any]
    """By their command-line names."""
    ramp: Ramp
    record: dict[str, Any]
    """config.json: `versions`, `devices`, `dataset`, `changes`."""
    lines: list[dict]
    """Lines of metrics.jsonl."""
    events: list[dict]
    summary: dict[str, Any] | None
    """None if the run is not complete."""

    def course(self, *path: str) -> Course:
        """Return the values at this place of metrics.jsonl's lines, as course("grad_norms", "embed")."""
        return course_of((line["step"], number(line, *path)) for line in self.lines)

    def names(self, *path: str) -> list[str]:
        """Return the keys at this place of metrics.jsonl's lines: names("grad_norms") are the groups."""
        names = {name for line in self.lines for name in at(line, *path) or ()}
        return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def along(self, axis: str, steps: list[int]) -> list[float]:
        """Return the positions of steps on an axis of AXES. Lines of evaluations have no seconds, and lines of spikes
        no tokens: these are interpolated between the logged lines around them."""
        known = self.course(axis)
        marks = Course([0, *known.steps], [0.0, *known.values])
        return [float(step) if axis == "step" else _between(marks, step) for step in steps]

    @property
    def last_step(self) -> int:
        """Return the newest step that has a line."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def last_sign(self) -> float:
        """Return when something was last written, in seconds since 1970; 0 for never."""
        return max((entry["time"] for entry in (*self.lines[-1:], *self.events[-1:])), default=0.0)

    @property
    def goodput(self) -> dict[str, float]:
        """Return the seconds of all starts, by their use (run/goodput.py)."""
        return goodput(self.events)

    @property
    def spikes(self) -> list[Spike]:
        """Return jumps of the loss, including rollbacks, which have their own line since their steps' lines are
        removed."""
        return [
            Spike(
                line["step"],
                number(line, kind, "loss"),
                number(line, kind, "median"),
                at(line, kind, "batch"),
                at(line, kind, "texts") or [],
                kind == "rollback",
            )
            for line in self.lines
            for kind in ("spike", "rollback")
            if kind in line
        ]

    @property
    def samples(self) -> list[tuple[int, list[str]]]:
        """Return continuations of the run's prompts, by their step."""
        return [(line["step"], line["samples"]) for line in self.lines if line.get("samples")]


def course_of(pairs: Iterable[tuple[int, float | None]]) -> Course:
    """Return the course of (step, value) pairs, without those that have no value."""
    known = [(step, value) for step, value in pairs if value is not None]
    return Course([step for step, _ in known], [value for _, value in known])


def at(line: dict, *path: str) -> Any:
    """Return the value at this place of nested dicts, or None."""
    value: Any = line
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def number(line: dict, *path: str) -> float | None:
    """Return the finite number at this place of nested dicts, or None."""
    value = at(line, *path)
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _between(marks: Course, step: int) -> float:
    """Return the value at a step, interpolated between the marks around it; after the last mark, the last value."""
    after = bisect_left(marks.steps, step)
    if after == len(marks.steps) or marks.steps[after] == step:
        return marks.values[min(after, len(marks.values) - 1)]
    left, right = marks.steps[after - 1], marks.steps[after]
    share = (step - left) / (right - left)
    return marks.values[after - 1] * (1 - share) + marks.values[after] * share


def read_run(folder: str | Path) -> Run:
    """Return the run in a folder. Raise UserError if there is none, or one that this version cannot read."""
    given, folder = str(folder), at_hand(folder)
    record_file, summary_file = folder / "config.json", folder / "summary.json"
    if not record_file.is_file():
        raise UserError(f"{given} holds no run (no config.json)")
    try:
        record = json.loads(record_file.read_bytes())
        config = config_from_json(json.dumps(record["config"]))
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        raise UserError(
            f"{record_file} is not the record of a run that this version can read ({type(error).__name__}: {error}); "
            "make its report with the version that trained it"
        ) from error
    lines = sorted(read_metrics(folder), key=lambda line: line["step"])
    summary = json.loads(summary_file.read_bytes()) if summary_file.exists() else None
    options = flat(record["config"])
    return Run(config.name, given, options, Ramp.of(config.batch), record, lines, Events(folder).read(), summary)


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return options in sections by their command-line names."""
    names: dict[str, Any] = {}
    for name, value in options.items():
        names |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return names


def read_comparisons(folder: str) -> list[dict[str, Any]]:
    """Return what bench.compare wrote to this folder; nothing if it is a run's."""
    file = Path(folder) / "compare.json"
    return json.loads(file.read_bytes())["comparisons"] if file.is_file() else []


def read_runs(given: list[str]) -> list[Run]:
    """Return the runs in these folders, each with a unique name: its folder if two have the same name. A folder of
    bench.compare gives its runs."""
    listed = lambda folder: [f"{folder}/{name}" for pair in read_comparisons(folder) for name in pair["runs"]]
    folders = [name for folder in given for name in listed(folder) or [folder]]
    runs = [read_run(folder) for folder in {place(folder): folder for folder in folders}.values()]
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=run.folder) for run in runs]
