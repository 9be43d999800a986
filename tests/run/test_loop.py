"""Test the loop of train.py: what happens after a step, and how it ends."""

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from evaluation.evaluator import Evaluator
from hosts.stop import Stop
from options.schema import ProfileConfig
from run.folder import RunFolder
from run.log import MetricsLog
from run.profile import Profile
from run.saver import Saver
from system.errors import Exit
from tests.commands import run, write_folder
from tests.helpers import tiny_config
from tests.run.short_runs import CONFIG, losses

SHORT = ("--steps=8", "--checkpoint.every_steps=2", "--checkpoint.keep=9", "--eval.every_steps=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a config and text."""
    return write_folder(tmp_path_factory.mktemp("loop"), CONFIG)


@pytest.fixture
def start(folder, monkeypatch) -> Callable[..., int]:
    """Return a function that runs train.py on one device, and returns its exit code."""
    monkeypatch.chdir(folder)
    return lambda run_dir, *options: run(
        "train", monkeypatch, "--config=tiny.py", f"--run_dir={run_dir}", *SHORT, *options, devices=1
    )


def saved(run_dir: str) -> list[int]:
    return [event["step"] for event in RunFolder(run_dir).events.read() if event["event"] == "saved"]


def evaluated(run_dir: str) -> list[int]:
    return [line["step"] for line in RunFolder(run_dir).metrics() if "val_loss" in line]


def call_at(patch, owner: type, name: str, at: int, then: Callable[[], Any]) -> None:
    """Call `then` before the `at`-th call of a method from now on."""
    original, calls = getattr(owner, name), [0]

    def method(self, *arguments):
        calls[0] += 1
        if calls[0] == at:
            then()
        return original(self, *arguments)

    patch.setattr(owner, name, method)


def note(monkeypatch, owner: type, name: str, order: list[str]) -> None:
    """Append the name and the step of each call of a method."""
    original = getattr(owner, name)
    noted = lambda self, step, *rest: order.append(f"{name} {step}") or original(self, step, *rest)
    monkeypatch.setattr(owner, name, noted)


def ask(monkeypatch, owner: type, name: str, at: int) -> None:
    """Ask the run to stop, as SIGTERM does, before the `at`-th call of a method."""
    stops = []
    entered = Stop.__enter__
    monkeypatch.setattr(Stop, "__enter__", lambda self: stops.append(self) or entered(self))
    call_at(monkeypatch, owner, name, at, lambda: stops[0]._preempt(signal.SIGTERM, None))


def test_it_takes_all_steps_and_saves_the_last_before_its_evaluation(start, monkeypatch):
    order, read = [], Path.read_bytes
    for owner, name in ((Saver, "save"), (MetricsLog, "evaluation")):
        note(monkeypatch, owner, name, order)
    monkeypatch.setattr(Path, "read_bytes", lambda path: order.append(path.name) or read(path))
    assert start("all") == Exit.COMPLETE
    first, last = order.index("evaluation 0"), order.index("evaluation 8")
    noted = [name for name in order[first : last + 1] if name not in ("events.jsonl", "lock")]
    saves_and_evaluations = ["evaluation 0", "save 2", "save 4", "evaluation 4", "save 6", "save 8", "evaluation 8"]
    assert noted == saves_and_evaluations  # nothing reads metrics.jsonl again, which grows with the run
    assert saved("all") == [2, 4, 6, 8] and [*losses(Path("all"))] == [*range(1, 9)]


@pytest.mark.medium
def test_a_run_asked_to_stop_saves_its_step_without_evaluation(start, monkeypatch):
    options = ("--checkpoint.every_steps=3",)
    with monkeypatch.context() as patch:
        ask(patch, MetricsLog, "step", 4)  # an evaluation follows step 4, but no regular save
        assert start("stopped", *options) == Exit.PREEMPTED
    assert saved("stopped") == [3, 4] and evaluated("stopped") == [0]
    assert start("stopped", *options) == Exit.COMPLETE and evaluated("stopped") == [0, 4, 8]


@pytest.mark.medium
def test_a_request_during_an_evaluation_ends_it_and_saves(start, monkeypatch):
    """The machine may be gone in seconds: a long evaluation must not delay the save."""
    options = ("--checkpoint.every_steps=100",)
    with monkeypatch.context() as patch:
        ask(patch, Evaluator, "__call__", 2)
        assert start("evaluating", *options) == Exit.PREEMPTED
    assert saved("evaluating") == [4] and evaluated("evaluating") == [0]
    assert start("evaluating", *options) == Exit.COMPLETE
    assert saved("evaluating") == [4, 8] and evaluated("evaluating") == [0, 4, 8]


@pytest.mark.parametrize(
    ("steps", "resumed", "process", "traced", "says"),
    [
        ("10:15", 9, 0, ["from 9", "to 15"], []),
        ("38:50", 0, 0, ["from 37", "to 40"], []),  # the part of the range within the run
        ("10:15", 0, 1, [], []),
        ("2:15", 2, 0, [], ["--profile.steps=2:15: step 2 is done already; nothing is traced"]),
    ],
)
def test_the_steps_asked_for_are_traced_into_the_run_s_folder(
    tmp_path, monkeypatch, messages, steps, resumed, process, traced, says
):
    config = replace(tiny_config(), run_dir=str(tmp_path), steps=40, profile=ProfileConfig(steps))
    seen, step = [], resumed
    state: Any = {}
    monkeypatch.setattr(jax, "process_index", lambda: process)
    starts = lambda folder: seen.append(f"from {step}") or folder == tmp_path / "profile" or pytest.fail(folder)
    monkeypatch.setattr(jax.profiler, "start_trace", starts)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(f"to {step}"))
    with Profile(config, RunFolder(tmp_path), resumed) as profile:
        while step < config.steps:
            profile.before(step + 1, state)  # pyright: ignore
            step += 1
            profile.after(step, state)  # pyright: ignore
    assert seen == traced and messages == says
