"""How far a run is: what the loop changes after each step, and what its hooks read."""

from collections import deque
from typing import NamedTuple

import jax

from configs.ramp import Ramp
from configs.schema import Config
from data.loader import StagedBatches
from run.metrics import Clock
from training.state import TrainState

WINDOW = 64  # steps whose losses are kept, to compare a loss with


class Start(NamedTuple):
    """Where a run starts, or is resumed."""

    state: TrainState
    step: int = 0
    """Steps taken."""
    tokens: int = 0
    """Tokens of those steps."""
    position: int = 0
    """Tokens of the data's sequence before the next batch: those of the steps, and what rollbacks left out."""
    seconds: float = 0.0
    """Of training."""
    losses: tuple[float, ...] = ()
    """Of the newest steps: what a jump is compared with."""


class Progress:
    """One run from one start on."""

    def __init__(self, config: Config, start: Start, batches: StagedBatches):
        """`batches`: those of the steps after `start`, by number."""
        self.config, self.start, self.batches = config, start, batches
        self.state, self.step = start.state, start.step
        self.clock = Clock(start.seconds, start.tokens)
        self.losses = deque(start.losses, WINDOW)
        """Losses of the newest steps that are read."""
        self.stopping = False
        """Whether somebody asked the run to stop after this step."""
        self.save_soon = False
        """Whether a save is due after the next step: the one before failed, or `checkpoint.every_minutes` passed."""

    @property
    def is_last(self) -> bool:
        """Return whether no step follows this one."""
        return self.stopping or self.step == self.config.steps

    def tokens_after(self, step: int) -> int:
        """Return the tokens of the run up to `step`."""
        return self.start.tokens + self._tokens_since(step)

    def position_after(self, step: int) -> int:
        """Return the tokens of the data's sequence up to the batch of `step`."""
        return self.start.position + self._tokens_since(step)

    def drop_state(self) -> None:
        """Free the devices' memory of the state, before another is restored."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def _tokens_since(self, step: int) -> int:
        ramp = Ramp.of(self.config.batch)
        return ramp.tokens(step) - ramp.tokens(self.start.step)


class Due(NamedTuple):
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    save: bool
    tasks: bool = False


def due_after(step: int, config: Config, *, last: bool, soon: bool = False) -> Due:
    """Return what is due after `step`. `last`: no step follows; `soon`: a save is due whatever the step."""
    every = lambda interval: step % interval == 0 or step == config.steps
    return Due(
        log=every(config.log.every_steps),
        evaluate=every(config.eval.every_steps),
        save=every(config.checkpoint.every_steps) or last or soon,
        tasks=config.eval.tasks != "" and every(config.eval.tasks_every_steps),
    )


class Jumped(Exception):
    """The loss jumped at a step: the run is to go back to its newest checkpoint and to leave the batches out."""

    def __init__(self, spike: dict, position: int):
        """`spike`: the jump's step, loss, median and rows. `position`: tokens of the data's sequence up to its batch,
        that batch included."""
        super().__init__(f"the loss jumped at step {spike['step']}")
        self.spike, self.position = spike, position


class GaveUp(Exception):
    """Another step makes no sense, for this reason."""
