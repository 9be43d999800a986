"""Measure a run's time: seconds of training, of waiting for data, and of each activity; and trace steps."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from configs.messages import LOGGER
from configs.schema import Config
from configs.validation import profiled_steps
from run.record import local_path
from training.state import TrainState

ACTIVITIES: tuple[str, ...] = ("start", "compile", "restore", "steps", "evaluation", "saves")


class Times:
    """Seconds of this process by activity. They sum to the time since this object was made."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self.activity, self.since = "start", time.monotonic()

    def enter(self, activity: str) -> str:
        """Count seconds from now on as this activity's. Return the activity before."""
        now, before = time.monotonic(), self.activity
        self.seconds[before] += now - self.since
        self.activity, self.since = activity, now
        return before

    def so_far(self) -> dict[str, float]:
        """Return the seconds of each activity until now."""
        self.enter(self.activity)
        return {activity: round(seconds, 3) for activity, seconds in self.seconds.items()}

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time inside as this activity's."""
        before = self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)


def seconds_by_activity(events: list[dict]) -> dict[str, float]:
    """Return the seconds of a run's processes, summed over their events `stop`; a killed process has none."""
    stops = [event.get("seconds", {}) for event in events if event["event"] == "stop"]
    return {activity: round(sum(stop.get(activity, 0.0) for stop in stops), 1) for activity in ACTIVITIES}


class Rates(NamedTuple):
    """Measurements of a clock since its last reading."""

    tokens_per_second: float
    data_wait: float
    """Share of the time in which the devices were idle because the next batch was not there."""
    own_seconds: float
    """Seconds in which this process did not wait for its devices, whose collectives wait for other processes."""


class Clock:
    """Seconds of training over all of a run's starts, without compilation, evaluation and sampling."""

    def __init__(self, seconds: float, tokens: int):
        """Take the seconds and tokens of the starts before."""
        self.before, self.origin = seconds, time.perf_counter()
        self.last = (seconds, tokens)
        self.stalled = self.on_devices = 0.0
        """Seconds since the last reading: of `data_wait`, and of waiting for the devices."""
        self.watching = ThreadPoolExecutor(1, "clock")
        self.devices_done: Future[float] | None = None
        """The time at which the devices completed the newest step."""

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.before + time.perf_counter() - self.origin

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch. Count the seconds of waiting for it in which the devices were idle."""
        asked = time.monotonic()
        batch = next(batches)
        if self.devices_done and self.devices_done.done():
            self.stalled += time.monotonic() - max(asked, self.devices_done.result())
        return batch

    def dispatched(self, metrics: Any) -> None:
        """Note the newest step's metrics, which are ready once the devices have completed it."""
        self.devices_done = self.watching.submit(lambda: (jax.block_until_ready(metrics), time.monotonic())[1])

    def rates(self, tokens: int) -> Rates:
        """Return the measurements since the last reading, at which the run had fewer than `tokens` tokens."""
        (seconds, before), self.last = self.last, (self.seconds, tokens)
        passed, stalled, on_devices = self.last[0] - seconds, self.stalled, self.on_devices
        self.stalled = self.on_devices = 0.0
        return Rates((tokens - before) / passed, stalled / passed, passed - on_devices)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for the devices."""
        start = time.perf_counter()
        yield
        self.on_devices += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside."""
        start = time.perf_counter()
        yield
        self.origin += time.perf_counter() - start

    def close(self) -> None:
        """End the thread, without a wait for the devices."""
        self.watching.shutdown(wait=False, cancel_futures=True)


class Profile:
    """Traces the steps of `profile.steps` on the first process, for TensorBoard, XProf or Perfetto. An unfinished trace
    is written at the end of `with`."""

    def __init__(self, config: Config, step: int):
        """Take the step after which the run continues."""
        self.first, self.last = profiled_steps(config) or (0, 0)
        self.folder = local_path(config.run_dir) / "profile"
        self.tracing = False
        if 0 < self.first <= step:
            LOGGER.info(f"--profile.steps={config.profile.steps}: step {step} is done already; nothing is traced")

    def before(self, step: int, state: TrainState) -> None:
        """Start the trace at its first step, once the devices have completed the steps before."""
        if step == self.first and jax.process_index() == 0:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """Wait for the trace's last step, and write the trace."""
        if step == self.last and self.tracing:
            jax.block_until_ready(state)
            self.__exit__()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()
