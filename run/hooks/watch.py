"""The hooks that watch the devices: hangs, the wait for data, and a trace of some steps."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from configs.messages import LOGGER
from configs.schema import Config
from configs.validation import profiled_steps
from hosts.stop import Watchdog, end_as_hung
from run.notify import tell
from run.progress import Due, Hook, Progress
from run.times import Times
from training.step import Metrics


class Watch(Hook):
    """Watches the steps, and the work between them. Ends a run that hangs."""

    def __init__(self, config: Config, times: Times):
        self.config, self.times = config, times
        self.step = 0
        self.watchdog = Watchdog(config.hang)  # until the first `begin`

    def begin(self, run: Progress) -> None:
        self.watchdog = Watchdog(self.config.hang, self._end).__enter__()

    def before_step(self, run: Progress) -> None:
        self.step = run.step + 1
        self.watchdog.dispatch(self.step)

    @contextmanager
    def away(self, what: str, activity: str) -> Iterator[None]:
        """Pause the limit on steps. Inside, `what` has its own limit (`hang.io_seconds`), and its time counts as
        `activity`."""
        with self.watchdog.paused(what), self.times.during(activity):
            yield

    def close(self) -> None:
        self.watchdog.__exit__()

    def _end(self, reason: str) -> None:
        """End this process, from the watchdog's thread."""
        tell(self.config, "failure", f"a hang: {reason}", self.step)
        end_as_hung(reason)


class Idle(Hook):
    """Records, in a thread, when the devices complete the newest step. A wait for data counts only after that."""

    def begin(self, run: Progress) -> None:
        self.watching = ThreadPoolExecutor(1, "idle")
        self.done: Future[float] | None = None

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        self.done = self.watching.submit(lambda: (jax.block_until_ready(metrics), time.monotonic())[1])

    def next_of(self, batches: Iterator[Any], run: Progress) -> Any:
        """Return the next batch. Count the seconds of waiting for it in which the devices were idle."""
        asked = time.monotonic()
        batch = next(batches)
        if self.done and self.done.done():
            idle = time.monotonic() - max(asked, self.done.result())
            run.clock.idle += idle
        return batch

    def close(self) -> None:
        self.watching.shutdown(wait=False, cancel_futures=True)


class Profile(Hook):
    """Traces the steps of `profile.steps`, on the first process."""

    def __init__(self, config: Config):
        self.first, self.last = profiled_steps(config) or (0, 0)
        self.folder = Path(config.run_dir) / "profile"
        self.tracing = False

    def begin(self, run: Progress) -> None:
        if 0 < self.first <= run.step:
            steps = run.config.profile.steps
            LOGGER.info(f"--profile.steps={steps}: step {run.step} is done already; nothing is traced")

    def before_step(self, run: Progress) -> None:
        """Start the trace at its first step, once the devices have completed the steps before."""
        if run.step + 1 == self.first and jax.process_index() == 0:
            jax.block_until_ready(run.state)
            jax.profiler.start_trace(self.folder)
            self.tracing = True

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        """Wait for the trace's last step, and write the trace."""
        if run.step == self.last and self.tracing:
            jax.block_until_ready(run.state)
            self.close()

    def close(self) -> None:
        """Write an unfinished trace."""
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()
