"""The lines of a run's record: events.jsonl and metrics.jsonl. Without JAX.

Events are never rewritten. A resumed run drops the metrics after its checkpoint (run/metrics.py).

events.jsonl has these lines. `fitted`: the rows that `batch.rows_per_device=auto` chose. `start`: the step, the
tokens before it, tokens per step, the mixture of datasets, the code's hash, versions, devices and mesh. `saved`: a
complete checkpoint. `went_back`: the older checkpoint of `--resume_step`. `out_of_memory`: the rows of the next start.
`stop`: the last step, the exit code, and the process's seconds by activity. Events identify a run whose
checkpoints are gone, and the batch that each step saw.
"""

import json
import math
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hosts.clock import ACTIVITIES
from system.files import append_whole, read_if_there


class Events:
    """The events of one run. Only the first process may write."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append an event, synced to disk, or nothing. First cut off a half line that a kill left. Raise OSError if
        that is impossible."""
        whole = len(self._whole_lines())
        if whole < len(read_if_there(self.path)):
            os.truncate(self.path, whole)
        line = json.dumps({"event": event, "step": step, **facts, "time": time.time()}) + "\n"
        append_whole(self.path, line)

    def read(self) -> list[dict]:
        """Return all events, except a half line at the end. Skip and report any other line that cannot be read: a
        checkpoint has itself the position in the data at which the run continues."""
        events = []
        for number, line in enumerate(self._whole_lines().splitlines(), 1):
            try:
                event = json.loads(line)
                _ = event["event"], event["step"] + 0
                events.append(event)
            except (ValueError, TypeError, LookupError):
                _report_once(f"{self.path}: line {number} is damaged, and skipped")
        return events

    def _whole_lines(self) -> bytes:
        text = read_if_there(self.path)
        return text[: text.rfind(b"\n") + 1]


@cache
def _report_once(message: str) -> None:
    """Print a message once in this process: a start reads its record several times."""
    print(message, file=sys.stderr)


def saved_up_to(events: list[dict]) -> int:
    """Return the newest step that was ever saved, by these events; 0 if none."""
    return max((event["step"] for event in events if event["event"] in ("saved", "start")), default=0)


class Place(NamedTuple):
    """The place of a step's batch in the data. It converts to JSON."""

    tokens: int
    """Tokens of the run before it."""
    tokens_per_step: int
    """Tokens of it."""
    mixture: dict[str, Any] | None
    """What is recorded of the mixture of datasets (data/order.py); None without a record, or a text."""


def place_of(events: list[dict], step: int, tokens_per_step: int) -> Place:
    """Return the place of the batch that follows `step` steps. `tokens_per_step` applies if no start is recorded."""
    start: dict[str, Any] = {"step": 0, "tokens": 0, "tokens_per_step": tokens_per_step}
    for event in events:
        if event["event"] == "start" and event["step"] <= step and "tokens" in event:
            start = event
    size = start["tokens_per_step"]
    return Place(start["tokens"] + (step - start["step"]) * size, size, start.get("mixture"))


def seconds_by_activity(events: list[dict]) -> dict[str, float]:
    """Return the seconds of a run's processes, summed over their events `stop`; a killed process has none."""
    stops = [event.get("seconds", {}) for event in events if event["event"] == "stop"]
    return {activity: round(sum(stop.get(activity, 0.0) for stop in stops), 1) for activity in ACTIVITIES}


def read_metrics(path: Path) -> list[dict]:
    """Return the lines of a metrics.jsonl, none if there is no such file. Skip and report a damaged line, except an
    incomplete last one, which a kill may leave. Raise OSError if the disk does not answer."""
    texts = read_if_there(path).removesuffix(b"\n").split(b"\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            _ = line["step"] + 0, line["time"] + 0
            lines.append(line)
        except (ValueError, TypeError, LookupError):
            if number < len(texts):
                _report_once(f"{path}: line {number} is damaged, and skipped")
    return lines


def figures_by_step(lines: list[dict], name: str) -> dict[int, float]:
    """Return a figure of each step that has it, if finite, by the lines of metrics.jsonl."""
    return {line["step"]: figure for line in lines if (figure := line.get(name)) is not None}


def finite(value: Any) -> Any:
    """Return the value for JSON, with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
