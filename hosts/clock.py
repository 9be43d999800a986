"""A clock that stands still while the system keeps this process from running, and the timeline of a run on it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

TICK = 0.25  # seconds between two readings of a process that runs
LEAST = 2.0  # seconds without a reading that may be a stop; shorter ones are a busy machine


class RunningClock:
    """Counts the seconds in which this process runs: not those between SIGSTOP and SIGCONT (Ctrl-Z), nor those of
    `docker pause`."""

    def __init__(self) -> None:
        """Start a thread that reads the clock, until the process ends."""
        self.lock = threading.Lock()
        self.read_at, self.worked = time.monotonic(), time.process_time()
        self.stopped = 0.0
        """Seconds in which the process did not run."""
        threading.Thread(target=self._tick, daemon=True, name="clock of running time").start()

    def seconds(self) -> float:
        """Return the seconds on this clock, which began at any time."""
        with self.lock:
            now, worked = time.monotonic(), time.process_time()
            gap, work = now - self.read_at, worked - self.worked
            # A C function that keeps Python's lock delays the thread, too, but takes a core's time.
            if gap > LEAST and work < gap / 2:
                self.stopped += gap - TICK
            self.read_at, self.worked = now, worked
            return now - self.stopped

    def _tick(self) -> None:
        never = threading.Event()
        while not never.wait(TICK):
            self.seconds()


@cache
def _clock() -> RunningClock:
    return RunningClock()


def running_seconds() -> float:
    """Return seconds as `time.monotonic` does, less those in which this process was stopped since the first call."""
    return _clock().seconds()


ACTIVITIES: tuple[str, ...] = ("start", "compile", "restore", "batches", "steps", "evaluation", "saves")
"""What a process of a run does: `batches` waits for a step's rows, or draws its answers."""
STEPPING = ("batches", "steps")
"""The activities of the loop between evaluations and saves."""


class Interval(NamedTuple):
    """A stretch of one activity, on the running clock."""

    activity: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end - self.start


class Timeline:
    """The activities of this process, one after another, on the running clock. Threads may read it.

    The seconds in a run's summary, its tokens per second, and the limit of a step are read from it.
    """

    def __init__(self) -> None:
        """Begin with the activity `start`."""
        self.lock = threading.Lock()
        self.ended = dict.fromkeys(ACTIVITIES, 0.0)
        """Seconds of the complete intervals of each activity."""
        self.activity, self.since = "start", running_seconds()

    def now(self) -> Interval:
        """Return the current activity, up to now."""
        with self.lock:
            return Interval(self.activity, self.since, running_seconds())

    def seconds(self, *activities: str) -> float:
        """Return the seconds of these activities until now."""
        return sum(self.by_activity()[activity] for activity in activities)

    def by_activity(self) -> dict[str, float]:
        """Return the seconds of each activity until now. They sum to the time since this object was made."""
        with self.lock:
            current = running_seconds() - self.since
            return self.ended | {self.activity: self.ended[self.activity] + current}

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Let the time inside be this activity's, and the time after it the one's before."""
        before = self._enter(activity)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, activity: str) -> str:
        with self.lock:
            now, before = running_seconds(), self.activity
            self.ended[before] += now - self.since
            self.activity, self.since = activity, now
            return before
