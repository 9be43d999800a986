"""The interface of hooks around a run's steps. Each has one subject. train.py lists them in order."""

from run.progress import Due, Progress
from training.step import Metrics


class Hook:
    """A hook that does nothing. Others override some methods. Every process calls every method, in the same order."""

    def begin(self, run: Progress) -> None:
        """Prepare for the steps of a run: at its start, when it is resumed, and after a rollback."""

    def before_step(self, run: Progress) -> None:
        """Prepare for step `run.step + 1`."""

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        """Act on step `run.step`, which the devices may still compute. `metrics` waits for them when it is read."""

    def finish(self, run: Progress) -> None:
        """Act when no step follows."""

    def close(self) -> None:
        """End what `begin` began, if it did."""
