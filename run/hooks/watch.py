"""The hook that ends a run whose steps or other work hang."""

from collections.abc import Iterator
from contextlib import contextmanager

from configs.ramp import Ramp
from configs.schema import Config
from hosts.stop import Watchdog, end_as_hung
from run.goodput import Times
from run.hooks.hook import Hook
from run.notify import tell
from run.progress import Progress


class Watch(Hook):
    """Watches the steps, and the work between them."""

    def __init__(self, config: Config, times: Times):
        self.config, self.times = config, times
        self.step = 0
        self.watchdog = self._new()

    def _new(self) -> Watchdog:
        return Watchdog(self.config.hang, self._end, work=Ramp.of(self.config.batch).tokens)

    def begin(self, run: Progress) -> None:
        self.watchdog = self._new().__enter__()

    def before_step(self, run: Progress) -> None:
        self.step = run.step + 1
        self.watchdog.step(self.step)

    @contextmanager
    def away(self, what: str, part: str) -> Iterator[None]:
        """Pause the limit on steps. Inside, `what` has its own limit (`hang.other_seconds`), and its time counts as
        `part`."""
        with self.watchdog.elsewhere(what), self.times.during(part):
            yield

    def close(self) -> None:
        self.watchdog.__exit__()

    def _end(self, reason: str) -> None:
        """End all processes, from the watchdog's thread."""
        tell(self.config, "failure", f"a hang: {reason}", self.step)
        end_as_hung(reason)
