"""What is reported of the steps: skipped ones, jumps of the loss, and the logged lines."""

from dataclasses import replace

import pytest

from configs.schema import StabilityConfig
from run.lines import read_metrics
from run.metrics import Clock, MetricsWriter
from run.monitor import ENOUGH, WINDOW, Monitor
from tests.helpers import tiny_config


def metrics(loss: float, skipped: int = 0, norm: float = 1.0) -> dict:
    return {"loss": loss, "skipped_steps": skipped, "grad_norms": {"embed": 0.5, "matrices": norm}}


@pytest.fixture
def monitor(tmp_path):
    """A monitor, and what it said."""

    def make(factor: float = 1.5, losses: list[float] | None = None, flops_share: float | None = None) -> tuple:
        config = replace(tiny_config(), steps=500, run_dir="here", stability=StabilityConfig(spike_factor=factor))
        clock, said = Clock(0.0, 0), []
        clock.start()
        rows_of = lambda step: {"batch": step - 1, "rows": [(0, step)]}
        writer = MetricsWriter(tmp_path, 0)
        monitor = Monitor(
            config,
            writer,
            clock,
            flops_share=flops_share,
            tokens_after=lambda step: 256 * step,
            epochs_after=lambda step: {"text": step / 8},
            rows_of=rows_of,
            say=said.append,
            losses=losses or [],
            step=0,
            skipped=0,
        )
        return monitor, said

    return make


def feed(monitor: Monitor, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, first):
        monitor.add(step, metrics(loss))


def test_a_line_tells_the_newest_step_and_reading_alone_writes_none(monitor, tmp_path):
    monitor, _ = monitor(flops_share=1e-6)
    feed(monitor, [3.0, 2.0])
    monitor.read()
    assert read_metrics(tmp_path) == []
    feed(monitor, [1.5], first=3)
    monitor.write()
    (line,) = read_metrics(tmp_path)
    assert (line["step"], line["tokens"], line["loss"]) == (3, 3 * 256, 1.5)
    assert line["mfu"] == pytest.approx(1e-6 * line["tokens_per_second"]) and line["grad_norms"]["embed"] == 0.5
    assert list(monitor.losses) == [3.0, 2.0, 1.5]


def test_a_jump_is_told_with_batch_and_rows_and_the_first_is_kept(monitor, tmp_path):
    monitor, said = monitor()
    feed(monitor, [2.0] * ENOUGH + [2.9, 3.1, 2.0, 9.0])
    monitor.read()
    spikes = [line for line in read_metrics(tmp_path) if "spike" in line]
    assert [line["step"] for line in spikes] == [ENOUGH + 2, ENOUGH + 4]
    expected = {"loss": 3.1, "median": 2.0, "batch": ENOUGH + 1, "rows": [[0, ENOUGH + 2]]}
    assert spikes[0]["spike"] == expected and monitor.spike["step"] == ENOUGH + 2
    assert f"step {ENOUGH + 2}: the loss jumped to 3.1000 from a median of 2.0000" in said[0]
    assert f"python -m data.inspect here --step={ENOUGH + 1}" in said[0]


@pytest.mark.parametrize(("factor", "before"), [(0.0, ENOUGH), (1.5, ENOUGH - 1)])
def test_no_jump_is_told_when_off_or_before_there_is_anything_to_compare_with(monitor, factor, before):
    monitor, said = monitor(factor)
    feed(monitor, [2.0] * before + [9.0])
    monitor.read()
    assert not said and monitor.spike is None


def test_what_a_loss_is_compared_with_goes_on_from_what_was_saved(monitor):
    whole, said = monitor(1.1)
    losses = [2.0 + (i * 37 % 11) / 20 for i in range(2 * WINDOW)]
    feed(whole, losses)
    whole.read()
    begun, first = monitor(1.1)
    feed(begun, losses[:70])
    begun.read()
    assert len(begun.losses) == WINDOW
    continued, rest = monitor(1.1, losses=list(begun.losses))
    feed(continued, losses[70:], first=71)
    continued.read()
    assert said == first + rest and said


def test_skipped_steps_are_told_with_their_reason_and_counted_in_a_row(monitor):
    monitor, said = monitor()
    monitor.add(1, metrics(2.0, skipped=1, norm=float("nan")))
    monitor.add(2, metrics(float("nan"), skipped=2, norm=float("inf")))
    monitor.read()
    assert monitor.skipped_in_a_row == 2 and "the gradient of matrices is not finite; 2 step(s)" in said[1]
    assert list(monitor.losses) == [2.0]
    monitor.add(3, metrics(2.0, skipped=2))
    monitor.add(4, metrics(0.0, skipped=3))
    monitor.read()
    assert monitor.skipped_in_a_row == 1 and "it has no valid token" in said[2]
