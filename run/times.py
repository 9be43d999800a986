"""Measure how many seconds each activity of a run takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
