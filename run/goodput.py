"""Count the uses of a run's time, over all its starts.

    start         from the process's start on: imports, waiting for other hosts, the text, checks, the first state
    compilation   of the training step (`evaluation` includes its own)
    restore       of a checkpoint
    steps         training steps: goodput is their share
    data          waiting for the next batch while the devices had nothing to do
    evaluation    on held-out text, and sampling
    saving        the delay of training by checkpoints
    lost          steps repeated after a kill
    down          from a process's last sign of life to the next start, unless the run was complete

A process records its seconds in events.jsonl at its start, at its end, and once a minute. The last seconds before a
kill, at most a minute, are not recorded and count as `down`. The parts sum to the wall time, which stops while the run
is complete.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.command_line import Exit

OF_A_PROCESS: tuple[str, ...] = ("start", "compilation", "restore", "steps", "data", "evaluation", "saving")
PARTS: tuple[str, ...] = (*OF_A_PROCESS, "lost", "down")
NOTED_EVERY = 60  # seconds


class Times:
    """Seconds of this process, in parts that sum to the time since it began."""

    def __init__(self) -> None:
        passed = seconds_of_process()
        self.began = time.time() - passed
        """Start time by the clock, which identifies the process in events."""
        self.spent = dict.fromkeys(OF_A_PROCESS, 0.0)
        self.part, self.since = "start", time.monotonic() - passed
        self.noted = time.monotonic()

    def enter(self, part: str) -> str:
        """Count seconds from now on as this part's. Return the part before."""
        now = time.monotonic()
        self.spent[self.part] += now - self.since
        before, self.part, self.since = self.part, part, now
        return before

    def count(self, part: str, seconds: float) -> None:
        """Move these seconds from the current part to this part."""
        self.spent[part] += seconds
        self.spent[self.part] -= seconds

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time inside as this part's."""
        before = self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def note(self) -> dict:
        """Return the entries for an event."""
        self.enter(self.part)
        self.noted = time.monotonic()
        return {"began": self.began, "seconds": {part: round(spent, 3) for part, spent in self.spent.items()}}

    @property
    def due(self) -> bool:
        """Return whether the last record is old."""
        return time.monotonic() - self.noted > NOTED_EVERY


def seconds_of_process() -> float:
    """Return the seconds since this process started; 0 if Linux does not provide them (proc(5), starttime)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def goodput(events: list[dict]) -> dict[str, float]:
    """Return the seconds of each of PARTS, which sum to the time from the first start to the last sign of life. Ignore
    events without seconds."""
    spent = dict.fromkeys(PARTS, 0.0)
    pieces: list[tuple[int, int, float]] = []  # first and last of consecutive steps, and their seconds
    began, ended = math.nan, math.nan  # start of the process whose events are read; nan: none yet
    step, before = 0, dict.fromkeys(OF_A_PROCESS, 0.0)
    for event in events:
        if "seconds" not in event:
            continue
        if event["began"] != began:
            spent["down"] += max(0.0, event["began"] - ended) if not math.isnan(ended) else 0.0
            began, before = event["began"], dict.fromkeys(OF_A_PROCESS, 0.0)
            step = event["step"]
        now = {part: float(event["seconds"].get(part, 0.0)) for part in OF_A_PROCESS}
        passed = {part: now[part] - before[part] for part in OF_A_PROCESS}
        for part, seconds in passed.items():
            spent[part] += seconds
        if event["step"] > step:
            pieces.append((step, event["step"], passed["steps"]))
        if event["event"] == "start":  # steps after that one are repeated
            left = []
            for first, last, seconds in pieces:
                end = max(first, min(last, event["step"]))
                lost = seconds * (last - end) / (last - first)
                spent["lost"] += lost
                spent["steps"] -= lost
                if end > first:
                    left.append((first, end, seconds - lost))
            pieces = left
        step, before = event["step"], now
        complete = event["event"] == "stop" and event.get("code") == Exit.COMPLETE
        ended = math.nan if complete else began + sum(now.values())
    return spent


def summed_up(spent: dict[str, float]) -> str:
    """Return a line with the share of steps in the wall time, and the other parts."""
    wall = sum(spent.values())
    if not wall:
        return "goodput: nothing was recorded"
    rest = sorted(((seconds, part) for part, seconds in spent.items() if part != "steps" and seconds), reverse=True)
    parts = ", ".join(f"{part} {seconds / wall:.1%}" for seconds, part in rest)
    return f"goodput: {spent['steps'] / wall:.1%} of {wall:.0f} s were steps; {parts}"
