"""What runs tell of themselves, read from their folders: facts for sentences (tools/report/sentences.py) and for plots
(tools/report/page.py).

It needs neither JAX nor the text, the checkpoints or the devices of a run, only config.json, metrics.jsonl,
events.jsonl and summary.json, so that a laptop can look at what a pod trained. Runs of other versions are read as far
as they say the same: whatever a line does not have is missing from a plot, and an option that only one of two runs
knows differs.
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from configs.ramp import Ramp
from configs.schema import UserError
from run.events import Events
from run.goodput import goodput
from run.lines import read_metrics
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
    """Of the steps before."""
    batch: int | None
    texts: list[str]
    """Beginnings of rows that the step saw; none in runs of versions that did not write them."""
    rolled_back: bool
    """Whether the run went back to the checkpoint of `step`, and left the batches up to the jump out."""


@dataclass(frozen=True)
class Run:
    """One run, as its folder tells of it."""

    name: str
    folder: str
    options: dict[str, Any]
    """By their command-line names."""
    ramp: Ramp
    record: dict[str, Any]
    """config.json: `versions`, `devices`, `dataset`, `changes`."""
    lines: list[dict]
    """Of metrics.jsonl."""
    events: list[dict]
    summary: dict[str, Any] | None
    """None: the run is not complete."""

    def course(self, *path: str) -> Course:
        """The values that metrics.jsonl has at this place of its lines: course("grad_norms", "embed")."""
        found = [(line["step"], value) for line in self.lines if (value := number(line, *path)) is not None]
        return Course([step for step, _ in found], [value for _, value in found])

    def names(self, *path: str) -> list[str]:
        """The keys that metrics.jsonl has at this place of its lines: names("grad_norms"), the groups."""
        found: dict[str, None] = {}
        for line in self.lines:
            found |= dict.fromkeys(at(line, *path) or ()) if isinstance(at(line, *path), dict) else {}
        return sorted(found, key=lambda name: (int(name) if name.isdecimal() else -1, name))

    def along(self, axis: str, steps: list[int]) -> list[float]:
        """Where steps lie on an axis of AXES. Lines of evaluations have no seconds, and those of spikes no tokens:
        these lie between what the logged lines around them say."""
        known = self.course(axis)
        marks = Course([0, *known.steps], [0.0, *known.values])
        return [float(step) if axis == "step" else _between(marks, step) for step in steps]

    @property
    def last_step(self) -> int:
        """The newest step that anything was written of."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def last_sign(self) -> float:
        """When anything was last written, in seconds since 1970; 0: never."""
        return max((entry.get("time", 0.0) for entry in (*self.lines[-1:], *self.events[-1:])), default=0.0)

    @property
    def goodput(self) -> dict[str, float]:
        """Seconds of all starts, by what they went to (run/goodput.py)."""
        return goodput(self.events)

    @property
    def spikes(self) -> list[Spike]:
        """Jumps of the loss, rollbacks among them: those leave a line of their own, as their steps' lines go."""
        return [
            Spike(
                line["step"],
                number(line, name, "loss"),
                number(line, name, "median"),
                at(line, name, "batch"),
                [str(text) for text in at(line, name, "texts") or ()],
                name == "rollback",
            )
            for line in self.lines
            for name in ("spike", "rollback")
            if name in line
        ]

    @property
    def samples(self) -> list[tuple[int, list[str]]]:
        """Continuations of the run's prompts, by the step they were made at."""
        return [(line["step"], [str(text) for text in line["samples"]]) for line in self.lines if line.get("samples")]

    @property
    def measured(self) -> bool:
        """Whether any line has diagnostics."""
        return any(line.get("diagnostics") for line in self.lines)


def at(line: dict, *path: str) -> Any:
    """What lies at this place of nested dicts; None where there is nothing."""
    value: Any = line
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def number(line: dict, *path: str) -> float | None:
    """The finite number at this place of nested dicts; None where there is none."""
    value = at(line, *path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _between(marks: Course, step: int) -> float:
    """The value at a step, on a straight line between the marks around it; the last one's after them."""
    after = bisect_left(marks.steps, step)
    if after == len(marks.steps) or marks.steps[after] == step:
        return marks.values[min(after, len(marks.values) - 1)]
    left, right = marks.steps[after - 1], marks.steps[after]
    share = (step - left) / (right - left)
    return marks.values[after - 1] * (1 - share) + marks.values[after] * share


def read_run(folder: str | Path) -> Run:
    """The run in a folder. UserError where there is none, or one that this version cannot read."""
    given, folder = str(folder), at_hand(folder)
    record_file = folder / "config.json"
    if not record_file.is_file():
        raise UserError(f"{given} holds no run (no config.json)")
    try:
        record = json.loads(record_file.read_bytes())
        options = flat(record["config"])
        name = str(options["name"])
        ramp = Ramp.read(options.get("batch.ramp", ""), options["batch.tokens_per_step"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{record_file} is not the record of a run that this version can read ({type(error).__name__}: {error}); "
            "make its report with the version that trained it"
        ) from error
    lines = sorted(read_metrics(folder), key=lambda line: line["step"])
    return Run(name, given, options, ramp, record, lines, Events(folder).read(), _summary(folder / "summary.json"))


def flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options in sections by their command-line names."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):  # none, or damaged: the run makes it again
        return None
    return found if isinstance(found, dict) else None


def read_runs(folders: list[str]) -> list[Run]:
    """The runs in these folders, each under a name of its own: its folder, where two have one name."""
    runs = [read_run(folder) for folder in {place(folder): folder for folder in folders}.values()]
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=run.folder) for run in runs]
