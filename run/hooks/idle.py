"""The hook that measures the devices' wait for data."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from run.goodput import Times
from run.hooks.hook import Hook
from run.progress import Due, Progress
from training.step import Metrics


class Idle(Hook):
    """Records, in a thread, when the devices complete the newest step. A wait for data counts only after that."""

    def __init__(self, times: Times):
        self.times = times

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
            self.times.count("data", idle)
        return batch

    def close(self) -> None:
        self.watching.shutdown(wait=False, cancel_futures=True)
