"""When the devices are idle: a wait for data counts only then."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


class Busy:
    """Record, in a thread, when the devices end the newest step."""

    def __init__(self) -> None:
        self.watching = ThreadPoolExecutor(1, "busy")

    def given(self, outputs: Any) -> None:
        """Watch a step that was given to the devices, by its outputs."""
        self.done = self.watching.submit(lambda: (jax.block_until_ready(outputs), time.monotonic())[1])

    def wait_for(self, batches: Iterator[Any]) -> tuple[Any, float]:
        """Return the next batch, and the seconds of waiting for it in which the devices were idle."""
        asked = time.monotonic()
        batch = next(batches)
        return batch, time.monotonic() - max(asked, self.done.result()) if self.done.done() else 0.0

    def close(self) -> None:
        """End the thread without waiting for it."""
        self.watching.shutdown(wait=False, cancel_futures=True)
