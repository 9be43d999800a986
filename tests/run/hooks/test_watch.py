"""Test what the watchdog watches, and what follows a hang."""

from unittest.mock import Mock

import pytest

from configs.schema import BatchConfig, HangConfig
from run.goodput import Times
from run.hooks.watch import Watch
from tests.run.hooks.runs import config_of, progress


@pytest.mark.parametrize(
    ("resumed", "ramp", "allowed"),
    [
        (0, "", 600),  # the first step: six times `hang.seconds`
        (20, "", 600),
        (0, "0:128,1280:256", 600),
    ],
)
def test_it_watches_the_next_step(tmp_path, resumed, ramp, allowed):
    batch = BatchConfig(sequence_length=16, tokens_per_step=256, rows_per_device=16, ramp=ramp)
    config = config_of(tmp_path, batch=batch, hang=HangConfig(seconds=100))
    run, watch = progress(config, resumed), Watch(config, Times())
    watch.begin(run)
    dog = watch.watchdog
    watch.before_step(run)
    assert (dog.done, dog.given, dog.allowed) == (resumed, resumed + 1, allowed)
    assert dog.work(20) - dog.work(10) == 10 * 256 and dog.work(10) == (1280 if ramp else 2560)
    watch.close()
    assert dog.ended.is_set()
    watch.begin(run)  # after a rollback
    assert watch.watchdog is not dog and not watch.watchdog.ended.is_set()
    watch.close()


def test_a_hang_is_reported_and_ends_all_processes_and_other_work_has_its_own_limit(tmp_path, monkeypatch):
    tell, end = Mock(), Mock()
    monkeypatch.setattr("run.hooks.watch.tell", tell)
    monkeypatch.setattr("run.hooks.watch.end_as_hung", end)
    config, times = config_of(tmp_path, hang=HangConfig(other_seconds=0.01)), Times()
    run, watch = progress(config, 20), Watch(config, times)
    watch.begin(run)
    watch.before_step(run)
    with watch.away("saving", "saving"):
        while not end.called:
            pass
    watch.close()
    reason = "saving takes longer than 0.01 s (--hang.other_seconds)"
    tell.assert_called_once_with(config, "failure", f"a hang: {reason}", 21)
    end.assert_called_once_with(reason)
    assert times.spent["saving"] >= 0.01 and times.part == "start"
