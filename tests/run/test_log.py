"""Test the log of a run's steps: the line of each, when its metrics are read, and what is reported."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import jax.numpy as jnp
import numpy as np
import pytest

from hosts.clock import Timeline
from options.schema import CheckpointConfig, EvalConfig, HangConfig, LogConfig
from run.ending import so_far
from run.folder import RunFolder
from run.log import ENOUGH, MOST_SKIPPED, MetricsLog, Pace, mfu_of
from run.metrics import drop_metrics_after, open_metrics
from run.record import seconds_by_activity
from run.source import ResumePoint, StepBatch
from system.errors import TrainingAborted
from tests.helpers import tiny_config
from training.state import TrainState

TOKENS = 256  # per step


@pytest.fixture
def make(tmp_path, messages):
    """Return a function that makes the log of a run of 40 steps from `step` on."""
    logs, steps = [], ExitStack()

    def make(step: int = 0, losses: tuple[float, ...] = (), run_dir: Any = tmp_path, **sections: Any) -> MetricsLog:
        defaults = {"log": LogConfig(5), "eval": EvalConfig(20), "checkpoint": CheckpointConfig(every_steps=10)}
        config = replace(tiny_config(), **{"steps": 40, "run_dir": str(run_dir), **defaults, **sections})
        mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]), size=1)
        built: Any = SimpleNamespace(config=config, mesh=mesh, batch_shape=(1, 1, 1), dtype=jnp.dtype("float32"))
        source: Any = SimpleNamespace(
            score=("val_bpb", 1),
            loss_is_a_measure=True,
            why_empty="",
            rows_of=lambda step: {"rows": [(0, step)]},
            describe_step=lambda line: f"loss {line['loss']:.4f}",
        )
        start = ResumePoint(TrainState(step, {}, (), 0), step, step * TOKENS, 0.0, losses)  # pyright: ignore
        writer = open_metrics(RunFolder(run_dir), drop_metrics_after(RunFolder(run_dir), step), config)
        timeline = Timeline()
        steps.enter_context(timeline.during("steps"))
        log = MetricsLog(built, RunFolder(run_dir), source, start, writer, {}, timeline)
        logs.append(log)
        return log

    yield make
    steps.close()
    for log in logs:
        if not log.watchdog.ended.is_set():  # not closed by the test
            log.__exit__()


def metrics(loss: float, skipped: int = 0, norm: float = 1.0, tokens: int = TOKENS) -> Any:
    norms = {"embed": 0.5, "matrices": norm}
    return {"loss": loss, "skipped_steps": skipped, "grad_norms": norms, "valid_tokens": tokens}


def take(log: MetricsLog, step: int, metrics: Any) -> None:
    """Log a step whose batch was there at once."""
    log.begin(step)
    log.step(step, metrics, StepBatch({}, {"epochs": {"text": step / 2}}))


def feed(log: MetricsLog, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, first):
        take(log, step, metrics(loss))
    log.flush()


def test_a_line_is_written_while_the_next_step_runs_or_when_it_is_asked_for(make, tmp_path, messages):
    log = make(log=LogConfig(2))
    take(log, 1, metrics(3.0))
    take(log, 2, metrics(2.0))
    assert log.watchdog.finished == 1 and not RunFolder(tmp_path).metrics()
    take(log, 3, metrics(1.5))
    take(log, 4, metrics(1.25))
    assert [line["step"] for line in RunFolder(tmp_path).metrics()] == [2]
    log.flush()  # before a checkpoint
    log.flush()
    first, second = RunFolder(tmp_path).metrics()
    assert (first["step"], first["tokens"], first["loss"]) == (2, 2 * TOKENS, 2.0)
    assert second["step"] == 4 and first["epochs"] == {"text": 1.0} and first["grad_norms"]["embed"] == 0.5
    assert first["tokens_per_second"] > 0 and first["data_wait"] == 0 and first["mfu"] is None
    assert [message.split("  ")[:2] for message in messages] == [
        ["step 2/40", "loss 2.0000"],
        ["step 4/40", "loss 1.2500"],
    ]


def test_a_step_without_a_valid_token_has_no_loss(make, tmp_path, messages):
    log = make(log=LogConfig(1))
    take(log, 1, metrics(0.0, skipped=1, tokens=0))
    log.flush()
    assert RunFolder(tmp_path).metrics()[0]["loss"] is None and "it has no valid token" in messages[0]


def test_the_peak_of_bfloat16_measures_no_other_type():
    config = tiny_config()
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")]), size=2)
    shares = {}
    for dtype in ("bfloat16", "float32"):
        built: Any = SimpleNamespace(config=config, mesh=mesh, dtype=jnp.dtype(dtype))
        shares[dtype] = mfu_of(built, 1e6)
    assert shares["float32"] is None and 0 < shares["bfloat16"] < 1


# Spikes and skipped steps.
def test_only_the_first_process_reads_a_spike_s_rows(make, monkeypatch, messages):
    monkeypatch.setattr("run.metrics.jax.process_index", lambda: 1)
    log = make(log=LogConfig(100))
    log.source.rows_of = Mock(side_effect=AssertionError("another process reads them"))
    feed(log, [2.0] * ENOUGH + [3.1])
    assert "jumped to 3.1000" in messages[0]


def test_a_spike_is_reported_with_batch_and_rows(make, tmp_path, messages):
    log = make(log=LogConfig(100))
    feed(log, [2.0] * ENOUGH + [2.9, 3.1, 2.0, 9.0])
    spikes = [line for line in RunFolder(tmp_path).metrics() if "spike" in line]
    assert [line["step"] for line in spikes] == [ENOUGH + 2, ENOUGH + 4]
    assert spikes[0]["spike"] == {"loss": 3.1, "median": 2.0, "rows": [[0, ENOUGH + 2]]}
    assert f"step {ENOUGH + 2}: the loss jumped to 3.1000 from a median of 2.0000" in messages[0]
    assert f"python -m tools.dataset {tmp_path} --step={ENOUGH + 2}" in messages[0]


def test_skipped_steps_are_reported_with_their_reason_and_ten_in_a_row_end_the_run(make, tmp_path, messages):
    log = make(log=LogConfig(100))
    take(log, 1, metrics(2.0, skipped=1, norm=float("nan")))
    take(log, 2, metrics(float("nan"), skipped=2, norm=float("inf")))
    log.flush()
    assert log.skipped_in_a_row == 2 and "the gradient of matrices is not finite; 2 step(s)" in messages[1]
    assert [*log.losses] == [2.0]
    take(log, 3, metrics(2.0, skipped=2))
    take(log, 4, metrics(0.0, skipped=3))
    log.flush()
    assert log.skipped_in_a_row == 1 and "it has no valid token" in messages[2]
    for step in range(5, 4 + MOST_SKIPPED):
        take(log, step, metrics(float("nan"), skipped=step - 1, norm=float("nan")))
    with pytest.raises(TrainingAborted, match="10 steps in a row were skipped"):
        log.flush()
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


# Hangs.
def test_the_watchdog_watches_the_next_step(make):
    with make(step=20, hang=HangConfig(seconds=100)) as log:
        take(log, 21, metrics(2.0))
        dog = log.watchdog
        assert (dog.finished, dog.dispatched) == (20, 21)
        assert dog.allowed == 600  # six times a later one
    assert dog.ended.is_set()


def test_a_hang_is_reported_and_ends_all_processes_and_other_work_has_its_own_limit(make, monkeypatch):
    ended = threading.Event()
    tell, end = Mock(), Mock(side_effect=lambda reason: ended.set())
    monkeypatch.setattr("run.log.tell", tell)
    monkeypatch.setattr("run.log.end_as_hung", end)
    with make(step=20, hang=HangConfig(io_seconds=0.01)) as log:
        take(log, 21, metrics(2.0))
        with log.timeline.during("saves"):
            assert ended.wait(30)
        log.watchdog.ended.set()
    reason = "saving takes longer than 0.01 s (hang.io_seconds in the config)"
    assert tell.call_args_list[0] == call(log.config, log.folder, "failure", f"a hang: {reason}", 21)
    assert end.call_args_list[0] == call(reason)
    assert log.timeline.seconds("saves") > 0 and log.timeline.now().activity == "steps"


# Seconds: of training, of waiting for data, and by activity.
def test_the_activities_of_a_process_sum_to_its_time_and_those_of_a_run_are_summed():
    began, timeline = time.monotonic(), Timeline()
    with timeline.during("compile"):
        time.sleep(0.02)
        with timeline.during("restore"):
            time.sleep(0.02)
    seconds = so_far(timeline)
    assert seconds["compile"] >= 0.02 and seconds["restore"] >= 0.02 and timeline.now().activity == "start"
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - began, abs=0.01)
    killed = {"event": "start", "step": 0, "time": 1.0}
    stops = [{"event": "stop", "step": step, "seconds": {"steps": 2.0, "saves": 1.0}} for step in (5, 9)]
    assert seconds_by_activity([killed, *stops]) == dict.fromkeys(seconds, 0.0) | {"steps": 4.0, "saves": 2.0}


def test_seconds_of_training_are_those_of_steps_batches_and_saves_over_all_starts(make, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("hosts.clock.running_seconds", lambda: now[0])
    log = make()
    for activity, seconds in (("steps", 4), ("evaluation", 1000), ("batches", 1), ("saves", 2), ("compile", 50)):
        with log.timeline.during(activity):
            now[0] += seconds
    assert log.seconds == 7
    log.start = log.start._replace(seconds=100.0)
    assert log.seconds == 107


def test_the_pace_is_that_since_the_last_reading():
    pace = Pace(seconds=100.0, tokens=50)
    assert pace.read(104.0, 58)[0] == 8 / 4
    assert pace.read(105.0, 60)[0] == 2 / 1
    pace.close()


def test_data_that_arrive_while_devices_work_cost_no_time(monkeypatch):
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr("run.log.running_seconds", lambda: now[0])
    pace = Pace(0.0, 0)
    working: Any = SimpleNamespace(block_until_ready=ended.wait)
    pace.dispatched(working, (0.0, 0.0))
    pace.dispatched(working, (1.0, 5.0))
    assert pace.stalled == 0  # while they are busy
    now[0] = 6.0
    ended.set()
    assert pace.devices_done and pace.devices_done.result() == 6.0
    pace.dispatched(working, (5.5, 9.0))
    assert pace.stalled == 3  # they were done meanwhile
    now[0] = 9.5
    assert pace.devices_done.result() in (6.0, 9.5)
    pace.dispatched(working, (10.0, 11.0))
    assert pace.stalled == 4  # they were done before
    assert pace.read(20.0, 40) == (2, 0.2)
    pace.close()
