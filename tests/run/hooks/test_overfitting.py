"""Test when a run is reported to learn its text by heart."""

from types import SimpleNamespace

import pytest

from run.hooks.overfitting import Overfitting
from run.lines import read_metrics
from run.metrics import MetricsWriter
from tests.run.hooks.runs import NOTHING, config_of, progress

EVALUATED = NOTHING._replace(evaluate=True)
FALLING = [5.0, 4.0, 3.0, 2.0, 1.5, 1.2, 1.1, 1.0]
TURNS = [9.0, 2.0, 1.5, 1.7, 1.8, 1.9, 2.0, 2.1]


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
            hook.after_step(progress(config, 20 * i), {}, EVALUATED)  # pyright: ignore
            hook.after_step(progress(config, 20 * i + 1), {}, NOTHING)  # pyright: ignore
        return [line for line in read_metrics(tmp_path) if "overfitting" in line]

    return feed


def test_a_turn_is_reported_once_with_its_minimum_and_remedies(reported, messages):
    (line,) = reported(FALLING, TURNS)
    assert (line["step"], line["overfitting"]) == (100, {"step": 40, "val_bpb": 1.5})
    (message,) = messages
    assert "step 100: " in message and "worse than step 40's 1.5000 bits per byte" in message
    assert all(word in message for word in ("fewer steps", "dropout", "weight decay", "--checkpoint.every_steps=20"))


def test_a_turn_is_reported_to_the_user_s_command(reported, monkeypatch):
    notified = []
    monkeypatch.setattr("run.hooks.overfitting.tell", lambda config, *facts: notified.append(facts))
    reported(FALLING, TURNS)
    ((event, message, step),) = notified
    assert (event, step) == ("overfitting", 100) and "by heart" in message


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 100),
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


def test_a_resumed_run_does_not_report_again(reported, tmp_path, messages):
    reported(FALLING, TURNS)
    messages.clear()
    config = config_of(tmp_path)
    hook = Overfitting(config, SimpleNamespace(writer=MetricsWriter(tmp_path, 140)))  # pyright: ignore
    hook.after_step(progress(config, 140), {}, EVALUATED)  # pyright: ignore
    assert not messages
