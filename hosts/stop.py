"""Stop a run: for a person, for a preemption notice, or because a step does not end, which blocks all processes.

A thread measures the time since the devices were last known to be done with a step. Steps are dispatched ahead of
time, so a single one cannot be timed. The steps under way may take FACTOR times the median of earlier ones.
"""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import jax
from jax.experimental import multihost_utils

from configs.command_line import Exit
from configs.schema import HangConfig
from data.store import OUTAGE
from hosts import peers
from hosts.peers import end_all
from hosts.runtime import max_over_processes

AWAY = 10  # seconds without an answer from a store: more than single errors cost
FACTOR = 10  # times the median step that a step may take, if that is more than `hang.seconds`
FIRST = 6  # times `hang.seconds` that the first step may take, which connects the devices


class Stop:
    """Let Ctrl-C and SIGTERM (a preemption notice) end the command in order, inside `with`.

    They end it at once, by an exception, except during training (`heeded`). There they become a request, which all
    processes of a run follow after the same step. A second Ctrl-C then ends the process at once.
    """

    def __init__(self) -> None:
        self.code: Exit | None = None
        """The exit code of the request to stop. Kept because a callback of JAX's may swallow the exception."""
        self.training = False
        self.asked, self.has_agreed = 0, False
        """How often this process, one of several, has asked, and the answer."""

    def __enter__(self) -> "Stop":
        # With several processes JAX's preemption service starts later, takes SIGTERM over, and informs the others.
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._preempt}
        self.before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def _interrupt(self, *_: object) -> None:
        if self.code == Exit.INTERRUPTED and self.training:
            os.write(2, b"interrupted twice: ended at once; steps after the newest checkpoint are lost\n")
            os._exit(Exit.INTERRUPTED)
        self.code = Exit.INTERRUPTED
        if not self.training:
            raise KeyboardInterrupt
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _preempt(self, *_: object) -> None:
        self.code = self.code or Exit.PREEMPTED
        if not self.training:
            raise SystemExit(Exit.PREEMPTED)

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Let a request wait for the end of a step inside. If JAX swallowed an earlier request's exception, raise it
        again."""
        if self.code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        if self.code:
            raise SystemExit(self.code)
        self.training = True
        try:
            yield
        finally:
            self.training = False

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """Let a request end the command at once, inside `heeded`: no step is taken here."""
        self.training = False
        yield
        self.training = True

    def agreed(self) -> bool:
        """Return whether the run is to stop now, for all processes alike. Every process must ask equally often."""
        if jax.process_count() == 1:
            return self.code is not None
        if not self.has_agreed:
            # JAX stops at the number after the last one it was given: before the first step that is 1, whatever the
            # run's first step.
            self.asked += 1
            self.has_agreed = multihost_utils.reached_preemption_sync_point(self.asked)
        return self.has_agreed

    def agreed_code(self) -> Exit:
        """Return the exit code of all processes: a person counts before a preemption. Every process must call it."""
        return Exit.INTERRUPTED if max_over_processes(self.code == Exit.INTERRUPTED) else Exit.PREEMPTED

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Watchdog:
    """End all processes with code 42, inside `with`, if a step takes far longer than others."""

    def __init__(self, config: HangConfig, bark: Callable[[str], Any] | None = None):
        """Call `bark(reason)` in the thread; by default it ends the processes."""
        self.config, self.bark = config, bark or end_as_hung
        self.each: deque[float] = deque(maxlen=64)  # seconds of a step, each time that the devices were done
        self.given = self.done = -1
        self.since = time.monotonic()  # infinite during other work
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.since = time.monotonic()
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
            now = time.monotonic()
            if self.since < math.inf:
                self.each.append((now - self.since) / (step - self.done))
                self.since = now
            self.done = step

    @contextmanager
    def elsewhere(self, what: str) -> Iterator[None]:
        """Pause the hang timer inside: an evaluation, a save. It has its own limit."""
        began, since, self.since = time.monotonic(), self.since, math.inf
        try:
            with limited(self.config, what, self.bark):
                yield
        finally:
            self.since = since + time.monotonic() - began

    @property
    def allowed(self) -> float:
        """Return the seconds that the dispatched steps, and one more, may take."""
        if not self.each:
            return FIRST * self.config.seconds
        return max(self.config.seconds, FACTOR * median(self.each) * (self.given + 1 - self.done))

    def check(self) -> None:
        """Bark if they have taken longer. A store that does not answer delays every process, but is not a hang: the
        time restarts when it answers."""
        if OUTAGE.seconds > AWAY:
            self.since = max(self.since, time.monotonic())
        passed, allowed = time.monotonic() - self.since, self.allowed
        if passed > allowed:
            usual = f"one takes {median(self.each):.3g} s" if self.each else "none has come to its end yet"
            self.bark(f"no step after {self.done} has ended for {passed:.0f} s (--hang.seconds; {usual})")

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.config.seconds / 4)):
            self.check()


@contextmanager
def limited(config: HangConfig, what: str, bark: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End all processes with code 42 if a restore, a save or an evaluation inside takes longer than
    `hang.other_seconds`. Processes that exchange values inside wait as long for each other."""
    seconds, before = config.other_seconds or math.inf, peers.patience
    peers.patience = seconds
    try:
        with limited_to(seconds, f"{what} takes longer than {seconds} s (--hang.other_seconds)", bark):
            yield
    finally:
        peers.patience = before


@contextmanager
def limited_to(seconds: float, reason: str, bark: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End all processes with code 42, or call `bark`, if the work inside takes longer than `seconds`."""
    late = threading.Timer(min(seconds, threading.TIMEOUT_MAX), bark or end_as_hung, [reason])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def end_as_hung(reason: str) -> None:
    """Print the reason and every thread's stack, and end all processes of the run."""
    print(f"error: {reason}; every thread of this process:", file=sys.stderr, flush=True)
    with suppress(Exception):  # if stderr is no file
        faulthandler.dump_traceback(sys.__stderr__ or 2)
    end_all(Exit.PEER_LOST, f"a hang: {reason}")
