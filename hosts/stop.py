"""Stop a run: for a person, for a preemption notice, or because a step does not end, which blocks all processes.

A thread measures the time since the devices were last known to be done with a step. Steps are dispatched ahead of
time, so a single one cannot be timed. The steps under way may take FACTOR times the median of earlier ones. No limit
counts the time in which the system stops this process (`hosts.clock`).
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
from contextlib import ExitStack, contextmanager, suppress
from statistics import median
from typing import Any

import jax
from jax.experimental import multihost_utils

from configs.schema import HangConfig
from hosts.clock import running_seconds
from hosts.distributed import max_over_processes
from hosts.runtime import explained
from system.errors import Exit

FACTOR = 10  # times the median step that a step may take, if that is more than `hang.seconds`
PATIENCE = 3  # seconds that a signal's handler has to end a process that does not train yet
FIRST = 6  # times `hang.seconds` that the first step may take, which connects the devices


class Stop:
    """Let Ctrl-C, SIGTERM (a preemption notice) and SIGHUP (a closed terminal) end the command in order, inside `with`.

    Enter it before `start_jax`, and `one_start` for each start of the run. Signals end the command at once, by an
    exception, except during training (`deferred_signals`). There they become a request, which all processes of a run
    follow after the same step. A second Ctrl-C then ends a process at once if it is alone. One of several waits for
    that step: all end with one code.

    Once several processes have joined, JAX's preemption service takes SIGTERM over. It is a request then from the start
    on, which the first `agreed` answers, after restoring and compiling.

    Python calls a signal's handler after the compilation or the step under way, which may take minutes. So a thread
    answers first.
    """

    def __init__(self, config: HangConfig) -> None:
        self.config = config
        self.code: Exit | None = None
        """The exit code of the request to stop. Kept because a callback of JAX's may swallow the exception."""
        self.training = self.has_trained = False
        """Whether steps are under way, and whether this start has come to its steps."""
        self.asked = 0
        """How often this process, one of several, has asked the others (`agreed`)."""
        self.has_agreed = False
        """The others' last answer."""
        self.leaving = ExitStack()
        """Ends the limit of time of a start that has come to its end."""
        self.signals = ExitStack()
        """Gives the signals back."""

    def __enter__(self) -> "Stop":
        handlers = {signal.SIGINT: self._interrupt, signal.SIGTERM: self._preempt, signal.SIGHUP: self._preempt}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
            del handlers[signal.SIGHUP]
        arrived, arriving = os.pipe()
        os.set_blocking(arriving, False)
        self.signals.callback(os.close, arriving)
        self.signals.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(arriving))
        for number, handler in handlers.items():
            self.signals.callback(signal.signal, number, signal.signal(number, handler))
        threading.Thread(target=self._answer, args=(arrived,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leaving.close()
        self.signals.close()

    @contextmanager
    def one_start(self) -> Iterator[None]:
        """Let signals end the start inside at once until its first step, and limit the time in which it ends."""
        self.leaving.close()  # of a start before it in this process
        self.training = self.has_trained = False
        self._raise_request()  # of a start before it, whose step then failed
        try:
            yield
        except BaseException as error:
            self._limit_leaving(error)
            raise

    def _limit_leaving(self, error: BaseException | None) -> None:
        """Let the rest of this start take at most `hang.io_seconds`: it writes to a disk that may hang. Then report the
        error that it ends with, if there is one, and end this process with code 42."""
        message = explained(error)[0] if error else ""  # the error itself would keep the start's arrays

        def end(reason: str) -> None:
            if message:
                print(message, file=sys.stderr)
            end_as_hung(reason)

        self.leaving.close()
        self.leaving.enter_context(io_limit(self.config, "the end of this process", end))

    def _answer(self, arrived: int) -> None:
        """Say what a signal waits for. Before training, end the process if its handler does not: nothing is lost."""
        while number := os.read(arrived, 1):
            name = signal.Signals(number[0]).name
            if self.has_trained:
                _say(f"{name}: the run stops after the step, evaluation or save under way")
                continue
            time.sleep(PATIENCE)
            if not (self.code or self.has_trained):
                _say(f"{name}: ended before the first step; nothing is lost")
                os._exit(Exit.INTERRUPTED if number[0] == signal.SIGINT else Exit.PREEMPTED)
        os.close(arrived)

    def _interrupt(self, *_: object) -> None:
        again, self.code = self.code == Exit.INTERRUPTED, Exit.INTERRUPTED
        if not self.training:
            raise KeyboardInterrupt
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        elif again:
            _say("interrupted twice: ended at once; steps after the newest checkpoint are lost")
            os._exit(Exit.INTERRUPTED)

    def _preempt(self, number: int, _: object) -> None:
        self.code = self.code or Exit.PREEMPTED
        if not self.training:
            raise SystemExit(Exit.PREEMPTED)
        if number == signal.SIGHUP and jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _raise_request(self) -> None:
        if self.code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        if self.code:
            raise SystemExit(self.code)

    @contextmanager
    def deferred_signals(self) -> Iterator[None]:
        """Let a request wait for the end of a step inside, and change nothing after it: the run is at its end. If JAX
        swallowed an earlier request's exception, raise it again."""
        self._raise_request()
        self.training = self.has_trained = True
        try:
            yield
        except BaseException as error:
            self.training = False
            self._limit_leaving(error)
            raise
        self._limit_leaving(None)

    def agreed(self) -> bool:
        """Ask all processes, and return whether the run is to stop now, for all alike. Every process must ask equally
        often: at each step, save, evaluation, and batch of one."""
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


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"{text}\n".encode())


class Watchdog:
    """End this process with code 42, inside `with`, if a step takes far longer than others."""

    def __init__(self, config: HangConfig, on_timeout: Callable[[str], Any] | None = None):
        """Call `on_timeout(reason)` in the thread that watches; by default it ends this process."""
        self.config, self.on_timeout = config, on_timeout or end_as_hung
        self.step_seconds: deque[float] = deque(maxlen=64)
        """Seconds of a step, each time that the devices were done."""
        self.dispatched = self.finished = -1
        self.since = running_seconds()  # infinite during other work
        self.ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.since = running_seconds()
        if self.config.seconds:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def dispatch(self, step: int) -> None:
        """Note that a step was given to the devices."""
        self.dispatched = step
        if self.finished < 0:
            self.finished = step - 1

    def finish(self, step: int) -> None:
        """Note that the devices have finished all steps up to this one."""
        if step > self.finished:
            now = running_seconds()
            if self.since < math.inf:
                self.step_seconds.append((now - self.since) / (step - self.finished))
                self.since = now
            self.finished = step

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Pause the timer of steps inside: an evaluation, a save. It has its own limit, `hang.io_seconds`."""
        began, since, self.since = running_seconds(), self.since, math.inf
        try:
            with io_limit(self.config, what, self.on_timeout):
                yield
        finally:
            self.since = since + running_seconds() - began

    @property
    def allowed(self) -> float:
        """Return the seconds that the dispatched steps, and one more, may take."""
        if not self.step_seconds:
            return FIRST * self.config.seconds
        return max(self.config.seconds, FACTOR * median(self.step_seconds) * (self.dispatched + 1 - self.finished))

    def check(self) -> None:
        """Call `on_timeout` if they have taken longer."""
        passed = running_seconds() - self.since
        if passed > self.allowed:
            usual = f"one takes {median(self.step_seconds):.3g} s" if self.step_seconds else "none has ended yet"
            self.on_timeout(f"no step after {self.finished} has ended for {passed:.0f} s (--hang.seconds; {usual})")

    def _watch(self) -> None:
        while not self.ended.wait(min(1.0, self.config.seconds / 4)):
            self.check()


@contextmanager
def io_limit(config: HangConfig, what: str, on_timeout: Callable[[str], Any] | None = None) -> Iterator[None]:
    """End this process with code 42 if a restore, a save or an evaluation inside takes longer than
    `hang.io_seconds`."""
    seconds = config.io_seconds or math.inf
    with time_limit(seconds, f"{what} takes longer than {seconds} s (hang.io_seconds in the config)", on_timeout):
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
