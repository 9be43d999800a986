"""Runs, as their folders record them, for the pages of tools.report. Without JAX."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from options.files import config_from_json
from options.schema import options
from run.folder import folder_to_read
from run.record import seconds_by_activity
from system.errors import UserError
from system.files import is_there

AXES = {"step": "steps", "seconds": "seconds of training", "tokens": "tokens"}


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
    """config.json: `config`, `versions`, `devices`, `dataset`, `changes`."""
    lines: list[dict]
    """Lines of metrics.jsonl, sorted by step."""
    summary: dict[str, Any]
    """Empty if the run is not complete."""
    seconds: float
    """Of all its processes that ended by themselves, with evaluations, saves and compilation."""
    files: Path
    """Its folder, or the copy of one in a bucket, on this machine."""

    def course(self, *path: str) -> Course:
        """Return the finite numbers at this place of the lines, as course("grad_norms", "embed")."""
        pairs = [(line["step"], at(line, *path)) for line in self.lines]
        known = [(step, value) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)]
        return Course([step for step, _ in known], [value for _, value in known])

    def names(self, *path: str) -> list[str]:
        """Return the keys at this place of the lines, as names("grad_norms"): the groups."""
        return sorted({name for line in self.lines for name in at(line, *path) or ()})

    def along(self, axis: str, steps: list[int]) -> list[float]:
        """Return the positions of steps on an axis of AXES. Evaluations have no seconds: these are interpolated between
        logged lines."""
        if axis == "step":
            return [float(step) for step in steps]
        known = self.course(axis)
        return np.interp(steps, [0, *known.steps], [0.0, *known.values]).tolist()


def at(line: dict, *path: str) -> Any:
    """Return the value at this place of nested dicts, or None."""
    value: Any = line
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def read_run(folder: str | Path) -> Run:
    """Return the run in a folder. Raise UserError if there is none, or one that this version cannot read."""
    run = folder_to_read(folder)
    record_file, summary_file = run.fetched() / "config.json", run.fetched() / "summary.json"
    if not is_there(record_file):
        raise UserError(f"{run} holds no run (no config.json)")
    try:
        record = json.loads(record_file.read_bytes())
        config = config_from_json(json.dumps(record["config"]))
    except (OSError, ValueError, LookupError, TypeError, UserError) as error:
        raise UserError(
            f"{record_file} is not the record of a run that this version can read ({type(error).__name__}: {error}); "
            "make its report with the version that trained it"
        ) from error
    lines = sorted(run.metrics(), key=lambda line: line["step"])
    summary = json.loads(summary_file.read_bytes()) if is_there(summary_file) else {}
    seconds = sum(seconds_by_activity(run.events.read()).values())
    return Run(config.name, run.name, options(config), record, lines, summary, seconds, run.fetched())


def read_runs(folders: list[str]) -> list[Run]:
    """Return the runs in these folders, each with a unique name: its folder if two have the same name."""
    runs = [read_run(folder) for folder in {folder_to_read(folder).path: folder for folder in folders}.values()]
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=run.folder) for run in runs]
