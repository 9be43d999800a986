"""The hook that reports skipped steps and jumps of the loss."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from configs.messages import LOGGER
from configs.schema import Config
from run.hooks.log import Log, ReadStep
from run.notify import tell
from run.progress import Due, GaveUp, Hook, Progress
from training.step import Metrics

MOST_SKIPPED = 10  # consecutive skipped steps that end the run
ENOUGH = 16  # fewest losses to compare a loss with


class Judge(Hook):
    """Reports skipped steps and jumps of the loss. Raises GaveUp after too many consecutive skipped steps."""

    def __init__(self, config: Config, log: Log, seen: Callable[[Any], dict]):
        """Take `seen(numbers)`, which returns the rows and texts of a batch by its rows' numbers."""
        self.config, self.log, self.seen = config, log, seen

    def begin(self, run: Progress) -> None:
        self.skipped, self.skipped_in_a_row = int(run.state.skipped_steps), 0

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        for read in self.log.just_read:
            self._count_skipped(read)
            self._report_jump(run, read)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise GaveUp(f"{MOST_SKIPPED} steps in a row were skipped")

    def _count_skipped(self, read: ReadStep) -> None:
        skipped = read.values["skipped_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped > self.skipped else 0
        self.skipped = skipped
        if self.skipped_in_a_row:
            bad = [group for group, norm in read.values["grad_norms"].items() if not math.isfinite(norm)]
            why = f"the gradient of {', '.join(bad)} is not finite" if bad else "it has no valid token"
            LOGGER.warning(f"step {read.step} changed nothing: {why}; {skipped} step(s) skipped so far")

    def _report_jump(self, run: Progress, read: ReadStep) -> None:
        """Compare a step's loss with those before it. Log a jump with its rows."""
        loss, factor = read.values["loss"], self.config.stability.spike_factor
        usual = median(run.losses) if len(run.losses) >= ENOUGH else math.inf
        if math.isfinite(loss):
            run.losses.append(loss)
        if not factor or not loss > factor * usual:
            return
        seen = self.seen(run.batches.row_numbers(read.step - 1 - run.start.step))
        jumped = f"step {read.step}: the loss jumped to {loss:.4f} from a median of {usual:.4f}"
        LOGGER.warning(f"{jumped}; its rows: python -m tools.dataset {self.config.run_dir} --step={read.step - 1}")
        self.log.writer.write({"step": read.step, "spike": {"loss": loss, "median": usual, **seen}})
        tell(self.config, "spike", jumped, read.step)
