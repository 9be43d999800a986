"""Test the messages about skipped steps and jumps of the loss."""

from types import SimpleNamespace

import pytest

from configs.schema import StabilityConfig
from run.hooks.judge import ENOUGH, Judge
from run.hooks.log import ReadStep
from run.metrics import MetricsWriter
from run.progress import WINDOW
from run.record import read_metrics
from tests.run.hooks.runs import NOTHING, config_of, progress


class Judged:
    """A judge of given losses."""

    def __init__(self, config, folder, losses):
        self.skipped = 0
        self.log = SimpleNamespace(just_read=[], writer=MetricsWriter(folder, 0))
        self.run = progress(config, losses=losses)
        seen = lambda i: {"rows": [(0, i + 1)]}
        self.judge = Judge(config, self.log, seen)  # pyright: ignore
        self.judge.begin(self.run)

    def read(self, *steps: ReadStep) -> None:
        self.log.just_read = list(steps)
        self.judge.after_step(self.run, {}, NOTHING)  # pyright: ignore

    def feed(self, losses: list[float], first: int = 1) -> None:
        self.read(*(read(step, loss) for step, loss in enumerate(losses, first)))


def read(step: int, loss: float, skipped: int = 0, norm: float = 1.0) -> ReadStep:
    norms = {"embed": 0.5, "matrices": norm}
    return ReadStep(step, {"loss": loss, "skipped_steps": skipped, "grad_norms": norms})


@pytest.fixture
def judged(tmp_path):
    def make(factor: float = 1.5, losses: tuple[float, ...] = ()) -> Judged:
        config = config_of("here", stability=StabilityConfig(spike_factor=factor))
        return Judged(config, tmp_path, losses)

    return make


def test_a_jump_is_reported_with_batch_and_rows(judged, tmp_path, messages):
    one = judged()
    one.feed([2.0] * ENOUGH + [2.9, 3.1, 2.0, 9.0])
    spikes = [line for line in read_metrics(tmp_path) if "spike" in line]
    assert [line["step"] for line in spikes] == [ENOUGH + 2, ENOUGH + 4]
    expected = {"loss": 3.1, "median": 2.0, "rows": [[0, ENOUGH + 2]]}
    assert spikes[0]["spike"] == expected
    assert f"step {ENOUGH + 2}: the loss jumped to 3.1000 from a median of 2.0000" in messages[0]
    assert f"python -m tools.dataset here --step={ENOUGH + 1}" in messages[0]


@pytest.mark.parametrize(("factor", "before"), [(0.0, ENOUGH), (1.5, ENOUGH - 1)])
def test_no_jump_is_reported_when_off_or_without_earlier_losses(judged, messages, factor, before):
    one = judged(factor)
    one.feed([2.0] * before + [9.0])
    assert not messages


def test_the_losses_to_compare_with_are_resumed_from_a_checkpoint(judged, messages):
    untouched = judged(1.1)
    losses = [2.0 + (i * 37 % 11) / 20 for i in range(2 * WINDOW)]
    untouched.feed(losses)
    expected = messages.copy()
    messages.clear()
    first = judged(1.1)
    first.feed(losses[:70])
    assert len(first.run.losses) == WINDOW
    resumed = judged(1.1, tuple(first.run.losses))
    resumed.feed(losses[70:], first=71)
    assert messages == expected and messages


def test_skipped_steps_are_reported_with_their_reason_and_counted_in_a_row(judged, messages):
    one = judged()
    one.read(read(1, 2.0, skipped=1, norm=float("nan")), read(2, float("nan"), skipped=2, norm=float("inf")))
    assert one.judge.skipped_in_a_row == 2 and "the gradient of matrices is not finite; 2 step(s)" in messages[1]
    assert list(one.run.losses) == [2.0]
    one.read(read(3, 2.0, skipped=2), read(4, 0.0, skipped=3))
    assert one.judge.skipped_in_a_row == 1 and "it has no valid token" in messages[2]
