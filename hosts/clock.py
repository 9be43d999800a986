"""A clock that stands still while the system keeps this process from running."""

import threading
import time
from functools import cache

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
