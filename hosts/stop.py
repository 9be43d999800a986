"""Stop a run for a person, or for a preemption notice."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils

from configs.exit_codes import Exit
from hosts.runtime import highest


class Stop:
    """Let Ctrl-C and SIGTERM (a preemption notice) end the command in order, inside `with`.

    They end it at once, by an exception, except during training (`heeded`). There they become a request, which all
    processes of a run follow after the same step. A second Ctrl-C then ends the process at once.
    """

    def __init__(self) -> None:
        self.code: Exit | None = None
        """The exit code of the request to stop. Kept because a callback of JAX's may swallow the exception."""
        self.training = False

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

    def after(self, step: int) -> bool:
        """Return whether the run is to stop after this step. Every process must ask after every step."""
        if jax.process_count() == 1:
            return self.code is not None
        return multihost_utils.reached_preemption_sync_point(step)

    def agreed_code(self) -> Exit:
        """Return the exit code of all processes: a person counts before a preemption. Every process must call it."""
        return Exit.INTERRUPTED if highest(self.code == Exit.INTERRUPTED) else Exit.PREEMPTED

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
