"""The hook that detects skipped steps and jumps of the loss, and the rollback after a jump."""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

from configs.messages import LOGGER
from configs.schema import Config
from hosts.runtime import on_first_process
from run.goodput import Times
from run.hooks.log import Log, ReadStep
from run.hooks.save import Save
from run.notify import tell
from run.progress import Due, GaveUp, Hook, Jumped, Progress
from run.record import Events, rollbacks_to
from training.step import Metrics

MOST_SKIPPED = 10  # consecutive skipped steps that end the run
ENOUGH = 16  # fewest losses to compare a loss with
MOST_ROLLBACKS = 3  # to one checkpoint


class Judge(Hook):
    """Reports skipped steps and jumps of the loss. Raises GaveUp after too many consecutive skipped steps, and Jumped
    if `stability.rollback` is on and there is a checkpoint to return to."""

    def __init__(self, config: Config, log: Log, save: Save, seen: Callable[[Any], dict]):
        """Take `seen(numbers)`, which returns the rows and texts of a batch by its rows' numbers."""
        self.config, self.log, self.save, self.seen = config, log, save, seen

    def begin(self, run: Progress) -> None:
        self.skipped, self.skipped_in_a_row = int(run.state.skipped_steps), 0

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        jumps = []
        for read in self.log.just_read:
            self._count_skipped(read)
            jumps += self._jumps(run, read)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise GaveUp(f"{MOST_SKIPPED} steps in a row were skipped")
        if jumps and self.config.stability.rollback:
            if self.save.newest():
                raise Jumped(jumps[0], run.position_after(jumps[0]["step"]))
            LOGGER.warning("no checkpoint is older than the jump: the run continues")

    def _count_skipped(self, read: ReadStep) -> None:
        skipped = read.values["skipped_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped > self.skipped else 0
        self.skipped = skipped
        if self.skipped_in_a_row:
            bad = [group for group, norm in read.values["grad_norms"].items() if not math.isfinite(norm)]
            why = f"the gradient of {', '.join(bad)} is not finite" if bad else "it has no valid token"
            LOGGER.warning(f"step {read.step} changed nothing: {why}; {skipped} step(s) skipped so far")

    def _jumps(self, run: Progress, read: ReadStep) -> list[dict]:
        """Compare a step's loss with those before it. Return the record of a jump, if any."""
        loss, factor = read.values["loss"], self.config.stability.spike_factor
        usual = median(run.losses) if len(run.losses) >= ENOUGH else math.inf
        if math.isfinite(loss):
            run.losses.append(loss)
        if not factor or not loss > factor * usual:
            return []
        batch = run.position_after(read.step - 1) // self.config.batch.tokens_per_step
        seen = {"batch": batch, **self.seen(run.batches.row_numbers(read.step - 1 - run.start.step))}
        spike = {"step": read.step, "spike": {"loss": loss, "median": usual, **seen}}
        jumped = f"step {read.step}: the loss jumped to {loss:.4f} from a median of {usual:.4f}"
        LOGGER.warning(f"{jumped}; its rows: python -m tools.dataset {self.config.run_dir} --step={read.step - 1}")
        self.log.writer.write(spike)
        tell(self.config, "spike", jumped, read.step)
        return [spike]


def roll_back(save: Save, times: Times, run: Progress, jump: Jumped) -> None:
    """Record that the run resumes from its newest checkpoint, without the batches up to the jump's. Raise GaveUp after
    MOST_ROLLBACKS rollbacks to that checkpoint."""
    config, spike = run.config, jump.spike
    if jax.process_index() == 0:
        Events(config.run_dir).add("running", run.step, **times.note())  # these steps are repeated
    newest = save.newest()
    if len(rollbacks_to(on_first_process(Events(config.run_dir).read), newest)) >= MOST_ROLLBACKS:
        run.step = spike["step"]
        raise GaveUp(f"{MOST_ROLLBACKS} rollbacks to step {newest} did not help")
    on_first_process(lambda: Events(config.run_dir).add("rollback", newest, position=jump.position, **spike["spike"]))
    back = f"back to step {newest}, and on without the batches up to step {spike['step']}"
    LOGGER.info(back)
    tell(config, "rollback", back, newest)
    run.step = newest
