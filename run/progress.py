"""The progress of a run, which the loop updates after each step, and the interface of the hooks that read it."""

from collections import deque
from typing import NamedTuple

import jax

from configs.schema import Config
from data.loader import StepBatches
from run.metrics import Clock
from training.state import TrainState
from training.step import Metrics

WINDOW = 64  # losses kept to compare a loss with


class Start(NamedTuple):
    """The start of a run, or of a resumed one."""

    state: TrainState
    step: int = 0
    """Steps taken."""
    tokens: int = 0
    """Tokens of those steps, which are the data's position."""
    seconds: float = 0.0
    """Seconds of training."""
    losses: tuple[float, ...] = ()
    """Losses of the newest steps, to compare a jump with."""


class Progress:
    """One run, from one start. Nine attributes: hooks know the loop, and each other's requests, only through them."""

    def __init__(self, config: Config, start: Start, batches: StepBatches):
        """Take `batches`: the batches of the steps after `start`, by number."""
        self.config, self.start, self.batches = config, start, batches
        self.state, self.step = start.state, start.step
        self.clock = Clock(start.seconds, start.tokens)
        self.losses = deque(start.losses, WINDOW)
        """Losses of the newest steps read so far."""
        self.stopping = False
        """True if the run was asked to stop after this step."""
        self.save_soon = False
        """True if a save is due after the next step: the last one failed, or `checkpoint.every_minutes` passed."""

    @property
    def is_last(self) -> bool:
        """Return whether no step follows this one."""
        return self.stopping or self.step == self.config.steps

    def tokens_after(self, step: int) -> int:
        """Return the tokens of the run up to `step`."""
        return self.start.tokens + (step - self.start.step) * self.config.batch.tokens_per_step

    def here(self) -> Start | None:
        """Return where the run is, to continue from the same state; None if a failed step took that with it."""
        try:
            jax.block_until_ready(self.state)
        except RuntimeError:  # deleted, or what the failed step should have made
            return None
        return Start(self.state, self.step, self.tokens_after(self.step), self.clock.seconds, tuple(self.losses))

    def drop_state(self) -> None:
        """Free the devices' memory of the state, before another is restored."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()


class Due(NamedTuple):
    """The work due after a step."""

    log: bool
    evaluate: bool
    save: bool
    tasks: bool = False


def due_after(step: int, config: Config, *, last: bool, soon: bool = False) -> Due:
    """Return the work due after `step`. `last`: no step follows. `soon`: a save is due in any case."""
    every = lambda interval: step % interval == 0 or step == config.steps
    return Due(
        log=every(config.log.every_steps),
        evaluate=every(config.eval.every_steps),
        save=every(config.checkpoint.every_steps) or last or soon,
        tasks=config.eval.tasks != "" and every(config.eval.tasks_every_steps),
    )


class GaveUp(Exception):
    """Another step makes no sense, for this reason."""


class Hook:
    """A hook that does nothing. Others override some methods. Every process calls every method, in the same order."""

    def begin(self, run: Progress) -> None:
        """Prepare for the steps of a run: at its start, and when it is resumed."""

    def before_step(self, run: Progress) -> None:
        """Prepare for step `run.step + 1`."""

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        """Act on step `run.step`, which the devices may still compute. `metrics` waits for them when it is read."""

    def finish(self, run: Progress) -> None:
        """Act when no step follows."""

    def close(self) -> None:
        """End what `begin` began, if it did."""
