"""Test what is evaluated, and when, and when a run is reported to learn its text by heart."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from configs.schema import EvalConfig
from run.hooks import Evaluate, Overfitting, Watch
from run.metrics import MetricsWriter
from run.record import read_metrics
from run.times import Times
from tests.run.hooks.runs import NOTHING, Saved, config_of, progress

TEXT = NOTHING._replace(evaluate=True)
BOTH = TEXT._replace(tasks=True)
FALLING = [5.0, 4.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0]
TURNS = [9.0, 2.0, 1.5, 1.7, 1.8, 1.9, 2.0, 2.1]


@pytest.mark.parametrize(
    ("step", "due", "stopping", "on_record", "expected"),
    [
        (20, TEXT, False, {}, ["val_loss"]),
        (60, BOTH, True, {}, []),  # the machine may disappear in seconds
        (60, BOTH, False, {"step": 60, "val_loss": 2.0}, ["core"]),
        (60, BOTH, False, {"step": 60, "core": 0.1}, ["val_loss"]),
        (60, BOTH, False, {"step": 40, "val_loss": 2.0}, ["val_loss", "core"]),
        # At a start: evaluations due after the newest checkpoint's step, but no benchmark of step 0.
        (0, None, False, {}, ["val_loss"]),
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
    measure = Mock(side_effect=lambda params: now.append(now.pop() + 5) or {"val_loss": 2.0, "val_bpb": 1.0})
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
    assert (times.seconds["evaluation"] > 0) == bool(expected) and run.clock.seconds == 0  # no training


@pytest.fixture
def reported(tmp_path):
    def feed(losses, bits, error=0.1, epochs=0.5) -> list[dict]:
        """Return the reports of a run with evaluations at steps 0, 20, ... and a logged step before each. `epochs`: of
        the steps between two evaluations."""
        log = SimpleNamespace(writer=MetricsWriter(tmp_path, 0))
        config = config_of(tmp_path)
        hook = Overfitting(config, log)  # pyright: ignore
        for i, (loss, val_bpb) in enumerate(zip(losses, bits)):
            if i:
                log.writer.write({"step": 20 * i - 5, "loss": loss, "epochs": {"a": 0.1, "b": epochs * i}})
            log.writer.write({"step": 20 * i, "val_bpb": val_bpb, "val_bpb_stderr": error})
            hook.after_step(progress(config, 20 * i), {}, TEXT)  # pyright: ignore
            hook.after_step(progress(config, 20 * i + 1), {}, NOTHING)  # pyright: ignore
        return [line for line in read_metrics(tmp_path) if "overfitting" in line]

    return feed


def test_a_turn_is_reported_once_with_its_minimum_and_remedies(reported, tmp_path, monkeypatch, messages):
    notified = []
    monkeypatch.setattr("run.hooks.evaluate.tell", lambda config, *facts: notified.append(facts))
    (line,) = reported(FALLING, TURNS)
    assert (line["step"], line["overfitting"]) == (100, {"step": 40, "val_bpb": 1.5})
    (message,) = messages
    assert "step 100: " in message and "worse than step 40's 1.5000 bits per byte" in message
    assert all(word in message for word in ("fewer steps", "dropout", "weight decay", "--checkpoint.every_steps=20"))
    assert notified == [("overfitting", message, 100)]
    config = config_of(tmp_path)  # a resumed run does not report again
    hook = Overfitting(config, SimpleNamespace(writer=MetricsWriter(tmp_path, 140)))  # pyright: ignore
    hook.after_step(progress(config, 140), {}, TEXT)  # pyright: ignore
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"error": None}, 100),  # one held-out document
        ({"error": 0.25}, 120),  # 1.7 is within the error of 1.5
        ({"error": 0.7}, None),
        ({"epochs": 0.1}, None),  # no row was seen twice
        ({"epochs": 0.18}, 120),
        ({"bits": TURNS[:5]}, None),
        ({"bits": [9.0, 2.0, 1.5, 1.7, 1.55, 1.9, 2.0, 2.1]}, 140),  # one evaluation is as good
        ({"bits": [9.0, 2.0, 1.5, 1.7, None, 1.9, 2.0, 2.1]}, 120),  # not finite
        ({"bits": [9.0, 2.0, 1.5, 1.7, 1.8, 1.4, 1.5, 1.6]}, None),  # a new minimum
        ({"bits": [1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]}, None),  # no training before the minimum
        ({"bits": [9.0, 2.0, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0]}, None),
        ({"losses": [5.0, 4.0, 3.0, 3.1, 3.2, 3.3, 3.3, 3.3]}, None),  # the training loss rises too
        ({"losses": [5.0, 4.0, 3.0, 2.0, 1.5, None, 1.1, 1.0]}, 120),
    ],
)
def test_when_a_turn_is_reported(reported, options, step):
    lines = reported(**{"losses": FALLING, "bits": TURNS} | options)
    assert [line["step"] for line in lines] == ([step] if step else [])
