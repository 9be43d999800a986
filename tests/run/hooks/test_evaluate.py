"""Test what is evaluated, and when."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from configs.schema import EvalConfig
from run.goodput import Times
from run.hooks.evaluate import Evaluate
from run.hooks.watch import Watch
from run.lines import read_metrics
from run.metrics import MetricsWriter
from tests.run.hooks.runs import NOTHING, Saved, config_of, progress

TEXT, TASKS = NOTHING._replace(evaluate=True), NOTHING._replace(tasks=True)
BOTH = TEXT._replace(tasks=True)


@pytest.mark.parametrize(
    ("step", "due", "stopping", "on_record", "expected"),
    [
        (7, NOTHING, False, {}, []),
        (20, TEXT, False, {}, ["val_loss"]),
        (30, TASKS, False, {}, ["core"]),
        (60, BOTH, False, {}, ["val_loss", "core"]),
        (60, BOTH, True, {}, []),  # the machine may disappear in seconds
        (60, BOTH, False, {"step": 60, "val_loss": 2.0}, ["core"]),
        (60, BOTH, False, {"step": 60, "core": 0.1}, ["val_loss"]),
        (60, BOTH, False, {"step": 40, "val_loss": 2.0}, ["val_loss", "core"]),
        # At a start: evaluations due after the newest checkpoint's step, but no benchmark of step 0.
        (0, None, False, {}, ["val_loss"]),
        (7, None, False, {}, []),
        (60, None, False, {}, ["val_loss", "core"]),
        (60, None, False, {"step": 60, "val_loss": 2.0}, ["core"]),
    ],
)
def test_what_is_due_and_not_on_record_is_evaluated(
    tmp_path, monkeypatch, messages, step, due, stopping, on_record, expected
):
    config = config_of(tmp_path, steps=100, eval=EvalConfig(20, tasks="core", tasks_every_steps=30))
    run, times, saved = progress(config, step), Times(), Saved()
    run.stopping = stopping
    log = SimpleNamespace(watch=Watch(config, times), writer=MetricsWriter(tmp_path, step))
    if on_record:
        log.writer.write(on_record)
    now = [0.0]
    monkeypatch.setattr(run.clock, "origin", 0.0)
    monkeypatch.setattr("run.metrics.time.perf_counter", lambda: now[0])
    measure = Mock(side_effect=lambda params, average: now.append(now.pop() + 5) or {"val_loss": 2.0, "val_bpb": 1.0})
    tasks = Mock(return_value={"core": 0.1, "core_stderr": 0.01})
    hook = Evaluate(config, measure, tasks, saved, log)  # pyright: ignore
    hook.begin(run) if due is None else hook.after_step(run, {}, due)  # pyright: ignore
    log.writer.close()
    lines = read_metrics(tmp_path)[bool(on_record) :]
    assert [next(name for name in ("val_loss", "core") if name in line) for line in lines] == expected
    assert all((line["step"], line["tokens"]) == (step, 256 * step) for line in lines)
    assert len(messages) == len(expected)
    assert [measure.called, tasks.called] == [name in expected for name in ("val_loss", "core")]
    assert saved.scores == ({step: 1.0} if measure.called else {})
    assert (times.spent["evaluation"] > 0) == bool(expected) and run.clock.seconds == 0  # no training
