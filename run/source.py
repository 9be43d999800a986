"""What differs between pretraining, fine-tuning and reinforcement: the source of a step's batch, and what an evaluation
measures."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from data.tokenizer import TextTokenizer
from options.schema import Config
from run.folder import RunFolder
from training.build import Build
from training.state import TrainState
from training.step import Batch


class ResumePoint(NamedTuple):
    """Where a start begins: before step 0, or after a checkpoint."""

    state: TrainState
    step: int = 0
    """Steps taken."""
    tokens: int = 0
    """Tokens of those steps, which are the data's position."""
    seconds: float = 0.0
    """Seconds of training."""
    losses: tuple[float, ...] = ()
    """Losses of the newest steps, to compare a spike with."""
    mixture: dict[str, Any] | None = None
    """What is recorded of the mixture of datasets; None without one."""


class StepBatch(NamedTuple):
    """A step's batch, and what to log beside the step's metrics."""

    arrays: Batch
    figures: dict[str, Any]
    waited: tuple[float, float] = (0.0, 0.0)
    """When this process began and ended to wait for the rows, on the running clock."""


class Source(Protocol):
    """Gives the batch of each step, and evaluates. `should_stop` asks all processes whether to stop. Every process must
    call the methods, but for `rows_of`."""

    @property
    def score(self) -> tuple[str, int]:
        """Return the figure of an evaluation that chooses the best checkpoint, and 1 if the lowest is best, -1 if the
        highest is."""
        ...

    @property
    def loss_is_a_measure(self) -> bool:
        """Return whether a loss says how good the network is. Otherwise a jump of it is no spike."""
        ...

    @property
    def mixture(self) -> dict[str, Any] | None:
        """Return what a later start needs to know of the mixture of datasets; None without one."""
        ...

    @property
    def why_empty(self) -> str:
        """Return why a step may have no valid token and be no failure; empty if it may not."""
        ...

    def batch(self, step: int, params: dict, should_stop: Callable[[], bool]) -> StepBatch | None:
        """Return the batch of the step after `step`; None once `should_stop()`. `params` are the state's."""
        ...

    def rows_of(self, step: int) -> dict[str, list]:
        """Return the rows of a step that was taken since this start, and the beginnings of some as text. The first
        process alone calls it."""
        ...

    def evaluate(self, params: dict, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the figures and samples of the network; None once `should_stop()`."""
        ...

    def describe_step(self, line: dict) -> str:
        """Return the figure of a logged step that a person follows."""
        ...

    def describe_evaluation(self, results: dict[str, Any]) -> list[str]:
        """Return lines for a person on an evaluation's results."""
        ...


class Material(Protocol):
    """What a run learns from, once it is opened: a text, or a task's questions."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    @property
    def fingerprint(self) -> str:
        """Return what identifies it."""
        ...

    @property
    def row_order(self) -> int:
        """Return the number of the order in which it gives its rows (data/order.py); 0 if it has none."""
        ...

    def outlook_message(self, rows: int, length: int, tokens: int, mixture: Any) -> str:
        """Return a line on what a run of `rows` rows of `length` tokens learns from. It continues after `tokens`
        tokens, with what is recorded of its mixture."""
        ...


class Stage(NamedTuple):
    """A stage of training: how its material is opened, before any compute, and made a source of batches."""

    open: Callable[[Config, RunFolder], tuple[Build, Any]]
    """Return the run's build and its `Material`. Raise UserError for a mistake in either."""
    source: Callable[[Build, Any], Callable[[ResumePoint], Source]]
    """Return the function from a point to the source of the steps after it. Raise UserError for what only shows once
    the rows are known."""
