"""Limits of time: for a step, which blocks all processes if it does not end, and for reading, writing and evaluating.

A thread measures the time since the devices were last known to be done with a step. Steps are dispatched ahead of
time, so a single one cannot be timed. The steps under way may take FACTOR times the median of earlier ones. No limit
counts the time in which the system stops this process (`hosts.clock`).
"""

import faulthandler
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from hosts.clock import STEPPING, Timeline, running_seconds
from options.schema import HangConfig
from system.errors import Exit

FACTOR = 10  # times the median step that a step may take, if that is more than `hang.seconds`
FIRST = 6  # times `hang.seconds` that the first step may take, which connects the devices
LIMITED = {"evaluation": "an evaluation", "saves": "saving"}
"""Activities that may take `hang.io_seconds` at a time, as a message names them."""


class Watchdog:
    """End this process with code 42, inside `with`, if a step takes far longer than others, or an evaluation or a save
    longer than `hang.io_seconds`. Times are read from the timeline, so that an evaluation is no slow step."""

    def __init__(
        self, config: HangConfig, timeline: Timeline, step: int, on_timeout: Callable[[str], Any] | None = None
    ):
        """Watch the steps after `step`. Call `on_timeout(reason)` in the thread that watches; by default it ends this
        process."""
        self.config, self.timeline, self.on_timeout = config, timeline, on_timeout or end_as_hung
        self.step_seconds: deque[float] = deque(maxlen=64)
        """Seconds of a step, each time that the devices were done."""
        self.dispatched = self.finished = step
        """The newest steps that were given to the devices, and that they have finished."""
        self.since = timeline.seconds(*STEPPING)
        """Seconds of steps on the timeline when they had finished it."""
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        limits = [limit for limit in (self.config.seconds, self.config.io_seconds) if limit]
        if limits:
            threading.Thread(target=self._watch, args=(min(1.0, min(limits) / 4),), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def finish(self, step: int) -> None:
        """Note that the devices have finished all steps up to this one."""
        if step > self.finished:
            now = self.timeline.seconds(*STEPPING)
            self.step_seconds.append((now - self.since) / (step - self.finished))
            self.since, self.finished = now, step

    @property
    def allowed(self) -> float:
        """Return the seconds that the dispatched steps, and one more, may take."""
        if not self.step_seconds:
            return FIRST * self.config.seconds
        return max(self.config.seconds, FACTOR * median(self.step_seconds) * (self.dispatched + 1 - self.finished))

    def check(self) -> None:
        """Call `on_timeout` if the current activity has taken longer than it may."""
        current = self.timeline.now()
        if current.activity in LIMITED and 0 < self.config.io_seconds < current.seconds:
            self.on_timeout(io_reason(self.config, LIMITED[current.activity]))
        if current.activity not in STEPPING or not self.config.seconds:
            return
        passed = self.timeline.seconds(*STEPPING) - self.since
        if passed > self.allowed:
            usual = f"one takes {median(self.step_seconds):.3g} s" if self.step_seconds else "none has ended yet"
            self.on_timeout(f"no step after {self.finished} has ended for {passed:.0f} s (--hang.seconds; {usual})")

    def _watch(self, every: float) -> None:
        while not self.ended.wait(every):
            self.check()


def io_reason(config: HangConfig, what: str) -> str:
    """Return why a process ends whose disk or store does not answer."""
    return f"{what} takes longer than {config.io_seconds} s (hang.io_seconds in the config)"


@contextmanager
def io_limit(config: HangConfig, what: str, on_timeout: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End this process with code 42 if a restore, a save or an evaluation inside takes longer than
    `hang.io_seconds`."""
    with time_limit(config.io_seconds or math.inf, io_reason(config, what), on_timeout):
        yield


@contextmanager
def time_limit(seconds: float, reason: str, on_timeout: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End this process with code 42, or call `on_timeout`, if the work inside takes longer than `seconds`, in which
    this process ran."""
    ended, until = threading.Event(), running_seconds() + seconds

    def watch() -> None:
        while (left := until - running_seconds()) > 0:
            if ended.wait(min(left, threading.TIMEOUT_MAX)):
                return
        (on_timeout or end_as_hung)(reason)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def end_as_hung(reason: str) -> None:
    """Print the reason and every thread's stack, and end this process, which ends the others of the run."""
    print(f"error: {reason}; every thread of this process:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(2)
    os._exit(Exit.PEER_LOST)
