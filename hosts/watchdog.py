"""Detect a step that does not end: on one process of many it blocks all others for ever.

A thread measures the time since the devices were last known to be done with a step. Steps are dispatched ahead of
time, so a single one cannot be timed. The steps under way may take FACTOR times the median of earlier ones.
"""

import faulthandler
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

from configs.exit_codes import Exit
from configs.schema import HangConfig
from data.store import OUTAGE
from hosts import peers
from hosts.peers import end_all

AWAY = 10  # seconds without an answer from a store: more than single errors cost
FACTOR = 10  # times the median step that a step may take, if that is more than `hang.seconds`
FIRST = 6  # times `hang.seconds` that the first step may take, which connects the devices


class Watchdog:
    """End all processes with code 42, inside `with`, if a step takes far longer than others."""

    def __init__(
        self,
        config: HangConfig,
        bark: Callable[[str], Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        work: Callable[[int], int] = lambda step: step,
    ):
        """Call `bark(reason)` in the thread; by default it ends the processes. `work(step)` is the work of the first
        `step` steps, if they differ in size."""
        self.config, self.bark, self.now, self.work = config, bark or end_as_hung, now, work
        self.each: deque[float] = deque(maxlen=64)  # seconds of a unit of work, each time that the devices were done
        self.given = self.done = -1
        self.since = now()
        self.paused = 0
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.since = self.now()
        if self.config.seconds:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def step(self, step: int) -> None:
        """Note that a step was given to the devices."""
        self.given = step
        if self.done < 0:
            self.done = step - 1

    def done_with(self, step: int) -> None:
        """Note that the devices are done with all steps up to this one."""
        if step > self.done:
            now = self.now()
            self.each.append((now - self.since) / (self.work(step) - self.work(self.done)))
            self.since, self.done = now, step

    @contextmanager
    def elsewhere(self, what: str) -> Iterator[None]:
        """Pause the hang timer inside: an evaluation, a save. It has its own limit."""
        self.paused += 1
        began = self.now()
        try:
            with limited(self.config, what, self.bark):
                yield
        finally:
            self.since += self.now() - began
            self.paused -= 1

    @property
    def allowed(self) -> float:
        """Return the seconds that the dispatched steps, and one more, may take."""
        if not self.each:
            return FIRST * self.config.seconds
        work = self.work(self.given + 1) - self.work(self.done)
        return max(self.config.seconds, FACTOR * median(self.each) * work)

    def check(self) -> None:
        """Bark if they have taken longer. A store that does not answer delays every process, but is not a hang: the
        time restarts when it answers."""
        if OUTAGE.seconds > AWAY:
            self.since = self.now()
        passed, allowed = self.now() - self.since, self.allowed
        if not self.paused and passed > allowed:
            work = self.work(self.done + 1) - self.work(self.done)
            usual = f"one takes {median(self.each) * work:.3g} s" if self.each else "none has come to its end yet"
            self.bark(f"no step after {self.done} has ended for {passed:.0f} s (--hang.seconds; {usual})")

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.config.seconds / 4)):
            self.check()


@contextmanager
def limited(config: HangConfig, what: str, bark: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End all processes with code 42 if a restore, a save or an evaluation inside takes longer than
    `hang.other_seconds`. Processes that exchange values inside wait as long for each other."""
    seconds, before = config.other_seconds or math.inf, peers.patience
    say = f"{what} takes longer than {seconds} s (--hang.other_seconds)"
    late = threading.Timer(min(seconds, threading.TIMEOUT_MAX), bark or end_as_hung, [say])
    late.daemon = True
    late.start()
    peers.patience = seconds
    try:
        yield
    finally:
        peers.patience = before
        late.cancel()


def end_as_hung(reason: str) -> None:
    """Print the reason and every thread's stack, and end all processes of the run."""
    print(f"error: {reason}; every thread of this process:", file=sys.stderr, flush=True)
    with suppress(Exception):  # if stderr is no file
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    end_all(Exit.PEER_LOST, f"a hang: {reason}")
