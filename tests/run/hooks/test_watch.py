"""Test what the hooks that watch the devices see: hangs, the wait for data, and a trace of some steps."""

import threading
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from configs.schema import HangConfig, ProfileConfig
from run.hooks import Idle, Profile, Watch
from run.times import Times
from tests.run.hooks.runs import NOTHING, config_of, progress


@pytest.mark.parametrize("resumed", [20, 0])
def test_the_watchdog_watches_the_next_step(tmp_path, resumed):
    config = config_of(tmp_path, hang=HangConfig(seconds=100))
    run, watch = progress(config, resumed), Watch(config, Times())
    watch.begin(run)
    dog = watch.watchdog
    watch.before_step(run)
    assert (dog.finished, dog.dispatched, dog.allowed) == (
        resumed,
        resumed + 1,
        600,
    )  # the first step: six times `hang.seconds`
    watch.close()
    assert dog.ended.is_set()
    watch.begin(run)  # again
    assert watch.watchdog is not dog and not watch.watchdog.ended.is_set()
    watch.close()


def test_a_hang_is_reported_and_ends_all_processes_and_other_work_has_its_own_limit(tmp_path, monkeypatch):
    ended = threading.Event()
    tell, end = Mock(), Mock(side_effect=lambda reason: ended.set())
    monkeypatch.setattr("run.hooks.watch.tell", tell)
    monkeypatch.setattr("run.hooks.watch.end_as_hung", end)
    config, times = config_of(tmp_path, hang=HangConfig(io_seconds=0.01)), Times()
    run, watch = progress(config, 20), Watch(config, times)
    watch.begin(run)
    watch.before_step(run)
    with watch.away("saving", "saves"):
        assert ended.wait(30)
    watch.close()
    reason = "saving takes longer than 0.01 s (--hang.io_seconds)"
    tell.assert_called_once_with(config, "failure", f"a hang: {reason}", 21)
    end.assert_called_once_with(reason)
    assert times.seconds["saves"] > 0 and times.activity == "start"


def test_data_that_arrive_while_devices_work_cost_no_time(monkeypatch):
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr("run.hooks.watch.time.monotonic", lambda: now[0])

    def batches():
        now[0] = 5.0
        yield "while they are busy"
        ended.set()
        assert idle.done.result() == 5.0
        now[0] = 9.0
        yield "they are done meanwhile"
        now[0] = 11.0
        yield "they were done before"

    idle, given, waits = Idle(), batches(), []
    run = SimpleNamespace(clock=SimpleNamespace(idle=0.0))
    idle.begin(run)  # pyright: ignore
    with closing(idle):
        idle.after_step(run, SimpleNamespace(block_until_ready=ended.wait), None)  # pyright: ignore
        for _ in range(3):
            idle.next_of(given, run)  # pyright: ignore
            waits.append(run.clock.idle)
    assert np.diff(waits, prepend=0.0).tolist() == [0.0, 4.0, 2.0]


@pytest.mark.parametrize(
    ("steps", "resumed", "process", "traced", "says"),
    [
        ("", 0, 0, [], []),
        ("10:15", 9, 0, ["from 9", "to 15"], []),
        ("38:50", 0, 0, ["from 37", "to 40"], []),  # the part of the range within the run
        ("10:15", 0, 1, [], []),
        ("2:15", 2, 0, [], ["--profile.steps=2:15: step 2 is done already; nothing is traced"]),
    ],
)
def test_the_steps_asked_for_are_traced_into_the_run_s_folder(
    tmp_path, monkeypatch, messages, steps, resumed, process, traced, says
):
    config, seen = config_of(tmp_path, profile=ProfileConfig(steps)), []
    run, hook = progress(config, resumed), Profile(config)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    starts = lambda folder: seen.append(f"from {run.step}") or folder == tmp_path / "profile" or pytest.fail(folder)
    monkeypatch.setattr(jax.profiler, "start_trace", starts)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(f"to {run.step}"))
    hook.begin(run)
    while run.step < config.steps:
        hook.before_step(run)
        run.step += 1
        hook.after_step(run, {}, NOTHING)  # pyright: ignore
    hook.close()
    assert seen == traced and messages == says
