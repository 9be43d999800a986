"""Test the loop with steps that cost nothing: what is due after a step, and how it ends."""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from configs.command_line import Exit
from configs.schema import CheckpointConfig, EvalConfig, LogConfig
from hosts.stop import Stop
from run.hooks import Evaluate, Idle, Judge, Log, Save, Watch
from run.programs import TrainSteps
from run.progress import Due, due_after
from run.record import read_metrics
from run.times import Times
from tests.run.hooks.runs import TOKENS, Saved, built_of, config_of, progress
from train import take_steps


@pytest.mark.parametrize(
    ("step", "last", "soon", "expected"),
    [
        (7, False, False, Due(log=False, evaluate=False, save=False)),
        (20, False, False, Due(log=True, evaluate=True, save=False)),
        (25, False, False, Due(log=False, evaluate=False, save=True)),
        (100, True, False, Due(log=True, evaluate=True, save=True)),
        (7, True, False, Due(log=False, evaluate=False, save=True)),
        (7, False, True, Due(log=False, evaluate=False, save=True)),
    ],
)
def test_what_is_due_after_a_step(step, last, soon, expected):
    config = config_of("", steps=100, log=LogConfig(10), checkpoint=CheckpointConfig(every_steps=25))
    assert due_after(step, config, last=last, soon=soon) == expected


def test_benchmarks_are_due_at_steps_of_their_own_and_at_the_end():
    config = config_of("", steps=100, eval=EvalConfig(20, tasks="core", tasks_every_steps=30))
    due = lambda config: [i for i in range(1, 101) if due_after(i, config, last=i == 100).tasks]
    assert due(config) == [30, 60, 90, 100]
    assert due(replace(config, eval=EvalConfig(20))) == []


class Loop:
    """Run take_steps with the hooks of train.py."""

    def __init__(self, built, run, train_step, measure, saved, stop):
        self.times, self.stop, self.progress = Times(), stop, run
        config = built.config
        watch, self.idle = Watch(config, self.times), Idle()
        log = Log(built, watch, lambda position: {})
        save = Save(config, saved, "print", watch)
        seen = lambda numbers: {"rows": [(0, numbers)], "texts": [f"row {numbers}"]}
        evaluate = Evaluate(config, measure, lambda params: {}, saved, log)
        self.hooks = [watch, self.idle, log, Judge(config, log, seen), save, evaluate]
        self.programs = TrainSteps(train_step, train_step)

    def run(self, batches):
        """Return where the run is when it ends, and why it gave up."""
        start = lambda begins: (self.progress, self.programs, iter(batches))

        return take_steps(start, self.idle, self.hooks, self.stop, Mock())  # pyright: ignore


@pytest.fixture
def make(tmp_path, messages):
    """Return a function that makes a loop of 40 steps with given losses, its output, and its saves."""

    def make(losses, resumed=None, stop=None, measure=None, **options):
        config = config_of(tmp_path, **options)
        skipped = itertools.accumulate(int(not np.isfinite(loss)) for loss in losses)
        steps = iter(list(zip(losses, skipped)))

        def train_step(state, batch):
            loss, skipped = next(steps)
            metrics = {"loss": loss, "skipped_steps": skipped, "grad_norms": {"embed": loss}, "learning_rate": {}}
            return state, metrics

        saved, run = Saved(), progress(config, **(resumed or {}))
        measure = measure or (lambda params: {"val_loss": 2.0, "val_bpb": 1.0, "samples": []})
        return Loop(built_of(config), run, train_step, measure, saved, stop or Stop()), messages, saved

    return make


def asking(stop: Stop, code: Exit, at: int):
    """Yield batches. Request a stop with batch `at`."""
    for i in itertools.count():
        stop.code = code if i == at else stop.code
        yield i


BATCHES = itertools.count()


def test_it_takes_all_steps_and_saves_the_last(make, tmp_path):
    loop, _, saved = make([2.0] * 40)
    run, gave_up = loop.run(BATCHES)
    assert run.step == 40 and run.tokens_after(40) == 40 * TOKENS and not gave_up and not run.stopping
    assert saved.steps == [10, 20, 30, 40]
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == list(range(5, 41, 5))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 20, 40]
    assert saved.scores == {0: 1.0, 20: 1.0, 40: 1.0}
    assert saved.facts[30]["tokens"] == 30 * TOKENS


def test_a_kill_during_an_evaluation_costs_no_step_and_the_next_start_makes_up_for_it(make, tmp_path):
    def killed(params):
        if saved.steps:
            raise SystemExit
        return {"val_loss": 3.0, "val_bpb": 2.0, "samples": []}

    loop, _, saved = make([2.0] * 40, measure=killed)
    with pytest.raises(SystemExit):
        loop.run(BATCHES)
    assert saved.steps == [10, 20] and saved.scores == {0: 2.0}
    loop, _, saved = make([2.0] * 20, {"step": 20})
    loop.run(BATCHES)
    assert saved.scores == {20: 1.0, 40: 1.0}
    assert [line["step"] for line in read_metrics(tmp_path) if "val_loss" in line] == [0, 20, 40]


@pytest.mark.parametrize("last", [13, 40])
def test_a_run_asked_to_stop_saves_its_step_without_evaluation(make, last):
    stop = Stop()
    loop, _, saved = make([2.0] * 40, stop=stop)
    run, _ = loop.run(asking(stop, Exit.PREEMPTED, last - 1))
    assert run.step == last and run.stopping and saved.steps == [*range(10, last, 10), last]
    assert sorted(saved.scores) == list(range(0, last, 20))


def test_many_skipped_steps_in_a_row_end_the_run_and_their_lines_are_json(make, tmp_path):
    loop, _, _ = make([2.0] * 10 + [float("nan")] * 30)
    assert "10 steps in a row were skipped" in loop.run(BATCHES)[1]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path)[-1]["loss"] is None
