"""Test the lines of metrics.jsonl: the step of each, when its metrics are read, and changes once."""

import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from configs.schema import DiagnosticsConfig, HangConfig
from run.hooks import History, Log, Watch
from run.metrics import MetricsWriter
from run.record import read_metrics
from run.times import Times
from tests.run.hooks.runs import NOTHING, built_of, config_of, progress


@pytest.mark.parametrize(
    ("due", "read_at_once", "lines_at_once"),
    [
        (NOTHING._replace(log=True), False, 0),
        (NOTHING._replace(save=True), True, 0),
        (NOTHING._replace(log=True, save=True), True, 1),
        (NOTHING._replace(log=True, tasks=True), True, 1),
    ],
)
def test_a_line_is_written_while_the_next_step_runs_unless_a_save_or_an_evaluation_follows(
    due, read_at_once, lines_at_once, tmp_path, messages
):
    config = config_of(tmp_path)
    watch = Watch(config, Times())
    log = Log(built_of(config), watch, lambda position: {"text": position / 512})
    log.flops_share = 1e-6
    run = progress(config)
    log.begin(run)
    run.clock.idle = 1e-6
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.5)):
        watch.before_step(run)
        run.step = step
        metrics = {"loss": loss, "grad_norms": {"embed": 0.5}, "skipped_steps": 0}
        log.after_step(run, metrics, due if step == 2 else NOTHING)  # pyright: ignore
        if step == 1:  # the watchdog's limit follows from its time
            assert [read.step for read in log.just_read] == [1]
        if step == 2:
            assert [read.step for read in log.just_read] == [2] * read_at_once
            assert len(read_metrics(tmp_path)) == lines_at_once
    log.close()
    lines = read_metrics(tmp_path)
    assert len(lines) == len(messages) == due.log
    for line in lines:
        assert (line["step"], line["tokens"], line["loss"]) == (2, 2 * 256, 2.0) and line["epochs"] == {"text": 1.0}
        assert line["mfu"] == pytest.approx(1e-6 * line["tokens_per_second"]) and line["grad_norms"]["embed"] == 0.5
        assert line["data_wait"] > 0 and messages[0].startswith("step 2/40  loss 2.0000  ")


def test_a_resumed_run_has_the_noise_scale_s_window_up_to_its_checkpoint(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (4, 8, 12):
        writer.write({"step": step, "diagnostics": {"signal": {"all": 1.0}, "noise": {"all": step}}})
    writer.close()
    config = config_of(tmp_path, diagnostics=DiagnosticsConfig(every_steps=4))
    log = Log(built_of(config), Watch(config, Times()), Mock())
    log.begin(progress(config, step=8))
    log.close()
    assert [measured["noise"] for measured in log.diagnosis.newest] == [{"all": 4}, {"all": 8}]


def test_steps_that_are_read_together_count_in_the_watchdog_s_limit_with_their_mean_time(tmp_path, monkeypatch):
    config = config_of(tmp_path, hang=HangConfig(seconds=0))  # no thread
    now = itertools.count(step=60.0)  # each call is a minute later
    watch = Watch(config, Times())
    log, run = Log(built_of(config), watch, lambda position: {}), progress(config)
    watch.begin(run)
    monkeypatch.setattr("hosts.stop.time", SimpleNamespace(monotonic=lambda: next(now)))
    log.begin(run)
    for step in range(1, 7):
        watch.before_step(run)
        run.step = step
        metrics = {"loss": 2.0, "grad_norms": {}, "skipped_steps": 0}
        log.after_step(run, metrics, NOTHING._replace(log=step == 5))  # pyright: ignore
    log.close(), watch.close()
    assert len(watch.watchdog.step_seconds) == 2  # the first step, and steps 2 to 5 once step 6 has started
    assert watch.watchdog.step_seconds[1] == pytest.approx(15)


def test_changes_of_options_are_written_once(tmp_path):
    run, writer = progress(config_of(tmp_path), step=20), MetricsWriter(tmp_path, 20)
    hook = History(type("Log", (), {"writer": writer}), ["steps: 20 -> 40"])  # pyright: ignore
    for _ in range(2):
        hook.begin(run)
    writer.close()
    assert [(line["step"], line["changes"]) for line in read_metrics(tmp_path)] == [(20, ["steps: 20 -> 40"])]
