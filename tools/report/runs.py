"""Read runs' records from their folders: facts for sentences (tools/report/sentences.py) and plots
(tools/report/page.py).

It needs only config.json, metrics.jsonl, events.jsonl and summary.json, so that a laptop can show what a pod trained.
It needs no JAX, and no text, checkpoints or devices of the run. A plot lacks what no line has.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.command_line import config_from_json
from configs.schema import UserError, options
from run.record import Events, at_hand, place, read_metrics

AXES = {"tokens": "tokens", "step": "steps", "seconds": "seconds of training"}


class Course(NamedTuple):
    """Values at steps, in the order of the steps."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class Run:
    """A run, as its folder records it."""

    name: str
    folder: str
    options: dict[str, Any]
    """By their command-line names."""
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
        if axis == "step":
            return [float(step) for step in steps]
        known = self.course(axis)
        return np.interp(steps, [0, *known.steps], [0.0, *known.values]).tolist()

    @property
    def spikes(self) -> list[tuple[int, dict]]:
        """Return the jumps of the loss: the step, and the facts of metrics.jsonl."""
        return [(line["step"], line["spike"]) for line in self.lines if "spike" in line]


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
    return Run(config.name, given, options(config), record, lines, Events(folder).read(), summary)


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
