"""Outages of stores: reported while they last, and visible to the watchdog, which would mistake the wait for a hang."""

import sys
import threading
import time


class Outage:
    """The state of an outage, shared by all stores that this process reads."""

    def __init__(self):
        self.lock = threading.Lock()
        self.since: float | None = None
        """Time of the first failed request since the last answer."""
        self.reported = 0.0
        """Length of the outage at its last report."""

    def failed(self, name: str, error: Exception) -> None:
        """Note that a request failed, and will be repeated."""
        with self.lock:
            self.since = self.since or time.monotonic()
            if self.seconds >= self.reported + 30:
                self.reported = self.seconds
                why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                print(f"{name}: no answer for {self.reported:.0f} s ({why}); trying again", file=sys.stderr, flush=True)

    def answered(self) -> None:
        if self.since is None:
            return
        with self.lock:
            if self.reported:
                print(f"the store answers again, after {self.seconds:.0f} s", file=sys.stderr, flush=True)
            self.since, self.reported = None, 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds for which requests have failed and none was answered."""
        return 0.0 if self.since is None else time.monotonic() - self.since


OUTAGE = Outage()
