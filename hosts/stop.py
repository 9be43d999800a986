"""Stop a run in order: for a person, or for a preemption notice."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import jax
from jax.experimental import multihost_utils

from hosts.distributed import max_over_processes
from hosts.watchdog import end_as_hung, io_limit
from options.schema import HangConfig
from system.errors import Exit
from system.exits import ending_of

PATIENCE = 3  # seconds that a signal's handler has to end a process that does not train yet


class Stop:
    """Let Ctrl-C, SIGTERM (a preemption notice) and SIGHUP (a closed terminal) end the command in order, inside `with`.

    Enter it before `start_jax`, and `one_start` for each start of the run. Signals end the command at once, by an
    exception, except during training (`deferred_signals`). There they become a request, which all processes of a run
    follow after the same step. A second Ctrl-C then ends a process at once if it is alone. One of several waits for
    that step: all end with one code.

    Once several processes have joined, JAX's preemption service takes SIGTERM over. It is a request then from the start
    on, which the first `ask` answers, after restoring and compiling.

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
        """How often this process, one of several, has asked the others (`ask`)."""
        self.agreed = False
        """The last answer."""
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
        message = ending_of(error).message if error else ""  # the error itself would keep the start's arrays

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

    def ask(self) -> bool:
        """Ask all processes, and return whether the run is to stop now, for all alike. Every process must ask equally
        often."""
        if jax.process_count() == 1:
            self.agreed = self.code is not None
        elif not self.agreed:
            # JAX stops at the number after the last one it was given: before the first step that is 1, whatever the
            # run's first step.
            self.asked += 1
            self.agreed = multihost_utils.reached_preemption_sync_point(self.asked)
        return self.agreed

    def agreed_code(self) -> Exit:
        """Return the exit code of all processes: a person counts before a preemption. Every process must call it."""
        return Exit.INTERRUPTED if max_over_processes(self.code == Exit.INTERRUPTED) else Exit.PREEMPTED


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"{text}\n".encode())
