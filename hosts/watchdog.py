"""A step that does not end: on one process of many it holds up all the others for ever.

A thread looks how long it is since the devices were last known to be done with a step. Steps are dispatched ahead of
time, so a single one cannot be timed: the steps that are under way may take so many times the median of earlier ones.
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
from data.outage import OUTAGE
from hosts import peers
from hosts.peers import end_all

AWAY = 10  # seconds without an answer from a store: longer than what single errors cost
FACTOR = 10  # so many times the median step are allowed to a step, if that is more than `hang.seconds`
FIRST = 6  # so many times `hang.seconds` are allowed to the first step, which connects the devices


class Watchdog:
    """Inside `with`, ends all processes with code 42 where a step takes far longer than its like."""

    def __init__(
        self,
        config: HangConfig,
        bark: Callable[[str], Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        work: Callable[[int], int] = lambda step: step,
    ):
        """`bark(reason)` is called in the thread; it ends the processes unless given. `work(step)`: that of so many
        steps, where they differ in size."""
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
        """A step was given to the devices."""
        self.given = step
        if self.done < 0:
            self.done = step - 1

    def done_with(self, step: int) -> None:
        """The devices are done with all steps up to this one."""
        if step > self.done:
            now = self.now()
            self.each.append((now - self.since) / (self.work(step) - self.work(self.done)))
            self.since, self.done = now, step

    @contextmanager
    def elsewhere(self, what: str) -> Iterator[None]:
        """What happens inside is no step: an evaluation, a save. It has a limit of its own."""
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
        """Seconds that the steps that were given, and one more, may take."""
        if not self.each:
            return FIRST * self.config.seconds
        work = self.work(self.given + 1) - self.work(self.done)
        return max(self.config.seconds, FACTOR * median(self.each) * work)

    def check(self) -> None:
        """Barks where they have taken longer. A store that is away holds up every process, and is no hang: the time
        begins anew when it answers."""
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
    """Ends all processes with code 42 where what happens inside takes longer than `hang.other_seconds`: a restore, a
    save, an evaluation. Processes that agree inside wait as long for each other."""
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
    """Says why, and where every thread is, and ends all processes of the run."""
    print(f"error: {reason}; every thread of this process:", file=sys.stderr, flush=True)
    with suppress(Exception):  # where stderr is no file
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    end_all(Exit.PEER_LOST, f"a hang: {reason}")
