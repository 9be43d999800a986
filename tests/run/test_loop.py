"""The loop: what is due after a step, and how it ends; with steps that cost nothing."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from configs.exit_codes import Exit
from configs.schema import BatchConfig, CheckpointConfig, EvalConfig, LogConfig, ProfileConfig, StabilityConfig
from hosts.runtime import Stop
from run.goodput import Times
from run.hooks.evaluate import Evaluate
from run.hooks.idle import Idle
from run.hooks.judge import ENOUGH, Judge
from run.hooks.log import Log
from run.hooks.profile import Profile
from run.hooks.save import Save
from run.hooks.watch import Watch
from run.lines import read_metrics
from run.progress import Due, Jumped, Progress, Start, due_after
from run.stages import Program
from tests.helpers import tiny_config
from train import take_steps
from training.state import TrainState


@pytest.mark.parametrize(
    ("step", "last", "soon", "expected"),
    [
        (7, False, False, Due(log=False, evaluate=False, save=False)),
        (10, False, False, Due(log=True, evaluate=False, save=False)),
        (20, False, False, Due(log=True, evaluate=True, save=False)),
        (25, False, False, Due(log=False, evaluate=False, save=True)),
        (100, True, False, Due(log=True, evaluate=True, save=True)),
        (99, True, False, Due(log=True, evaluate=True, save=True)),
        (7, True, False, Due(log=False, evaluate=False, save=True)),
        (7, False, True, Due(log=False, evaluate=False, save=True)),
    ],
)
def test_what_is_due_after_a_step(step, last, soon, expected):
    config = replace(
        tiny_config(),
        steps=99 if step == 99 else 100,
        log=LogConfig(10),
        eval=EvalConfig(20),
        checkpoint=CheckpointConfig(every_steps=25),
    )
    assert due_after(step, config, last=last, soon=soon) == expected


def test_benchmarks_are_due_at_steps_of_their_own_and_at_the_end():
    config = replace(tiny_config(), steps=100, eval=EvalConfig(20, tasks="core", tasks_every_steps=30))
    due = lambda config: [i for i in range(1, 101) if due_after(i, config, last=i == 100).tasks]
    assert due(config) == [30, 60, 90, 100]
    assert due(replace(config, eval=EvalConfig(20))) == []


def test_positions_follow_the_ramp_rollbacks_included(make):
    """Ten steps of 128 tokens, then steps of 256; the loss jumps at step 25, and step 20 is saved before."""
    batch = BatchConfig(sequence_length=16, tokens_per_step=256, rows_per_device=16, ramp="0:128,1270:256")
    losses = [2.0] * 24 + [9.0] + [2.0] * 20
    loop, _, saved = make(losses, batch=batch)
    loop.run(itertools.repeat({}))
    assert loop.jump.position == 1280 + 15 * 256
    assert [(saved.facts[step]["tokens"], saved.facts[step]["position"]) for step in (10, 20)] == [
        (1280, 1280),
        (3840, 3840),
    ]
    start = Start(TrainState(20, {}, (), 0), 20, 3840, loop.jump.position)  # pyright: ignore
    loop, _, saved = make([2.0] * 20, start=start, batch=batch)
    assert not loop.run(itertools.repeat({}))[1]
    assert (saved.facts[40]["tokens"], saved.facts[40]["position"]) == (1280 + 30 * 256, 1280 + 35 * 256)


class Saved:
    """Checkpoints in memory; those of `failing_steps` fail."""

    def __init__(self, steps=(), failing_steps=()):
        self.steps, self.failing_steps, self.facts, self.scores = list(steps), set(failing_steps), {}, {}
        self.failed_saves, self.failure, self.messages, self.pending = 0, "the disk is full", [], None
        self.record = Mock()
        self.passing = False

    @property
    def newest(self):
        return max(self.steps, default=0)

    def save(self, step, state, facts):
        if step in self.failing_steps:
            self.failed_saves += 1
            self.messages.append(f"{self.failed_saves} save(s) in a row failed: {self.failure}; trying again")
        else:
            self.failed_saves = 0
            self.steps.append(step)
            self.facts[step] = facts

    def score(self, step, val_bpb):
        self.scores[step] = val_bpb

    def failing(self, wait=True):
        return self.failed_saves


class Loop:
    """take_steps with the hooks of train.py. A jump ends it."""

    def __init__(self, built, start, train_step, measure, saved, stop, said):
        self.times, self.stop, self.start, self.jump = Times(), stop, start, None
        config, say = built.config, said.append
        watch, self.idle = Watch(config, self.times), Idle(self.times)
        log = Log(built, watch, lambda position: {}, saved.record, say)
        save = Save(config, saved, "print", watch, say)
        seen = lambda numbers: {"rows": [(0, numbers)], "texts": [f"row {numbers}"]}
        evaluate = Evaluate(config, measure, lambda params: {}, saved, log, say)
        self.hooks = [watch, self.idle, Profile(config, say), log, Judge(config, log, save, seen, say), save, evaluate]
        self.programs = [Program(0, train_step, train_step)]
        self.progress = Progress(config, start, SimpleNamespace(row_numbers=lambda i: i))  # pyright: ignore

    def run(self, batches):
        """Return where the run is when it ends, and why it gave up."""
        start = lambda: (self.progress, iter(batches))

        def go_back(run, jump: Jumped):
            self.jump, self.was_stopping, run.stopping = jump, run.stopping, True

        return take_steps(start, self.programs, self.idle, self.hooks, self.stop, go_back)  # pyright: ignore


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A loop of 40 steps whose losses are given, what it says, and what it saves. Three failed saves end it."""
    monkeypatch.setattr("run.hooks.save.MOST_FAILED", 3)

    def make(losses, start=None, checkpoints=None, stop=None, measure=None, **options):
        config = replace(
            tiny_config(),
            steps=40,
            run_dir=str(tmp_path),
            log=LogConfig(5),
            eval=EvalConfig(20),
            stability=StabilityConfig(rollback=True),
            **{"checkpoint": CheckpointConfig(every_steps=10), **options},
        )
        skipped = itertools.accumulate(int(not np.isfinite(loss)) for loss in losses)
        steps = iter(list(zip(losses, skipped)))

        def train_step(state, batch):
            loss, skipped = next(steps)
            metrics = {"loss": loss, "skipped_steps": skipped, "grad_norms": {"embed": loss}, "learning_rate": {}}
            return state, metrics

        mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]), size=1)
        built, said = SimpleNamespace(config=config, mesh=mesh), []
        saved = Saved() if checkpoints is None else checkpoints
        start = start or Start(TrainState(0, {}, (), 0))  # pyright: ignore
        measure = measure or (lambda params: {"val_loss": 2.0, "val_bpb": 1.0, "samples": []})
        return Loop(built, start, train_step, measure, saved, stop or Stop(), said), said, saved

    return make


BATCHES = itertools.count()
TOKENS = 256  # of a step


def test_it_takes_all_steps_and_saves_the_last(make, tmp_path):
    loop, _, saved = make([2.0] * 40)
    run, gave_up = loop.run(BATCHES)
    assert run.step == 40 and run.tokens_after(40) == 40 * TOKENS and not gave_up and not run.stopping
    assert saved.steps == [10, 20, 30, 40]
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == list(range(5, 41, 5))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 20, 40]
    assert saved.scores == {0: 1.0, 20: 1.0, 40: 1.0}
    assert saved.facts[30]["tokens"] == saved.facts[30]["position"] == 30 * TOKENS


def test_a_kill_during_an_evaluation_costs_no_step_and_the_next_start_makes_up_for_it(make, tmp_path):
    def killed(params):
        if saved.steps:
            raise SystemExit
        return {"val_loss": 3.0, "val_bpb": 2.0, "samples": []}

    loop, _, saved = make([2.0] * 40, measure=killed)
    with pytest.raises(SystemExit):
        loop.run(BATCHES)
    assert saved.steps == [10, 20] and saved.scores == {0: 2.0}
    loop, _, saved = make([2.0] * 20, Start(TrainState(20, {}, (), 0), step=20, tokens=20 * TOKENS))  # pyright: ignore
    loop.run(BATCHES)
    assert saved.scores == {20: 1.0, 40: 1.0}
    assert [line["step"] for line in read_metrics(tmp_path) if "val_loss" in line] == [0, 20, 40]


@pytest.mark.parametrize("last", [20, 40])
def test_a_run_that_is_to_stop_evaluates_nothing(make, last):
    stop = Stop()
    loop, _, saved = make([2.0] * 40, stop=stop)

    def batches():
        for i in itertools.count():
            stop.code = Exit.PREEMPTED if i == last - 1 else stop.code
            yield i

    run, _ = loop.run(batches())
    assert run.step == last and run.stopping and saved.newest == last
    assert sorted(saved.scores) == list(range(0, last, 20))


def test_each_minute_s_sign_of_life_is_copied_to_where_the_checkpoints_are(make, monkeypatch):
    monkeypatch.setattr("run.goodput.NOTED_EVERY", 0)
    loop, _, saved = make([2.0] * 40)
    loop.run(BATCHES)
    assert saved.record.copy_events.called


def test_minutes_make_a_checkpoint_due_after_a_step_that_is_logged(make, monkeypatch):
    clock = itertools.count(step=13.0)  # asked at the start, at each logged step, and at each save
    monkeypatch.setattr("run.hooks.save.time", SimpleNamespace(monotonic=lambda: next(clock)))
    loop, _, saved = make([2.0] * 40, checkpoint=CheckpointConfig(every_steps=1000, every_minutes=0.5))
    loop.run(BATCHES)
    assert saved.steps == [16, 31, 40]  # 39 seconds, at the third


def test_steps_of_a_profile_are_traced_into_the_runs_folder(make, tmp_path, monkeypatch):
    traced = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: traced.append((folder, loop.progress.step)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: traced.append(loop.progress.step))
    loop, _, _ = make([2.0] * 40, profile=ProfileConfig("10:15"))
    loop.run(BATCHES)
    assert traced == [(tmp_path / "profile", 9), 15]
    traced.clear()
    loop, _, _ = make([2.0] * 40, profile=ProfileConfig("38:50"))
    loop.run(BATCHES)
    assert traced == [(tmp_path / "profile", 37), 40]  # what there is of it


def test_tokens_and_position_go_on_from_where_they_were(make, tmp_path):
    """Whatever a step's size was before, and whatever rollbacks left out."""
    state = TrainState(20, {}, (), 0)  # pyright: ignore
    loop, _, saved = make([2.0] * 20, Start(state, step=20, tokens=1000, position=1500))
    assert loop.run(BATCHES)[0].tokens_after(40) == 1000 + 20 * TOKENS
    assert saved.facts[30]["tokens"] == 1000 + 10 * TOKENS and saved.facts[30]["position"] == 1500 + 10 * TOKENS
    assert read_metrics(tmp_path)[-1]["tokens"] == 1000 + 20 * TOKENS


def test_a_jump_goes_back_to_the_newest_checkpoint_and_says_where_the_data_go_on(make):
    loop, _, saved = make([2.0] * 26 + [9.0] + [2.0] * 13)
    loop.run(BATCHES)
    assert saved.newest == 20 and loop.jump.position == 27 * TOKENS and not loop.was_stopping
    assert loop.jump.spike["spike"]["batch"] == 26 and loop.jump.spike["spike"]["rows"] == [(0, 26)]


def test_a_jump_before_the_first_checkpoint_is_said_and_forgotten(make):
    losses = [2.0] * ENOUGH + [9.0] + [2.0] * 23
    loop, said, saved = make(losses, checkpoint=CheckpointConfig(every_steps=20))
    assert loop.run(BATCHES)[0].step == 40 and saved.steps == [20, 40]
    assert any("no checkpoint from before the jump" in text for text in said)


def test_who_asks_to_stop_while_the_loss_jumps_is_heard(make):
    stop = Stop()
    loop, _, _ = make([2.0] * 24 + [9.0] + [2.0] * 15, stop=stop)

    def batches():
        for i in itertools.count():
            stop.code = Exit.PREEMPTED if i == 25 else stop.code  # asked for before step 26
            yield i

    loop.run(batches())
    assert loop.jump and loop.was_stopping


def test_a_request_to_stop_is_heeded_after_the_step_and_saved(make):
    stop = Stop()
    loop, _, saved = make([2.0] * 40, stop=stop)

    def batches():
        for i in itertools.count():
            stop.code = Exit.INTERRUPTED if i == 12 else stop.code
            yield i

    run, _ = loop.run(batches())
    assert run.step == 13 and run.stopping and saved.steps == [10, 13]


def test_saves_that_fail_are_tried_again_at_each_step_logged_and_at_last_end_the_run(make):
    loop, said, saved = make([2.0] * 40, checkpoints=Saved(failing_steps={10}))
    assert not loop.run(BATCHES)[1]
    assert saved.steps[0] == 16  # the line of step 15 is written, and what failed is seen, while step 16 runs
    assert sum("1 save(s) in a row failed" in text for text in said) == 1
    loop, said, saved = make([2.0] * 40, checkpoints=Saved(failing_steps=range(41)))
    _, gave_up = loop.run(BATCHES)
    assert "3 save(s) in a row failed: the disk is full" in gave_up
    assert [text[:6] for text in said if "in a row" in text] == ["1 save", "2 save", "3 save"]
    assert saved.newest == 0


def test_only_what_the_devices_lack_is_waiting_for_data(make, monkeypatch, tmp_path):
    def waits(self, batches, run):
        run.clock.idle += 2.0
        self.times.count("data", 2.0)
        return next(batches)

    monkeypatch.setattr(Idle, "next_of", waits)
    loop, _, _ = make([2.0] * 40)
    assert not loop.run(BATCHES)[1]
    assert loop.times.spent["data"] == 2.0 * 40
    assert all(line["data_wait"] > 0 for line in read_metrics(tmp_path) if "loss" in line)


def test_a_disk_that_is_away_for_a_while_does_not_end_the_run(make, monkeypatch):
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: checkpoints.failing_steps.clear())
    checkpoints = Saved(failing_steps=range(41))
    checkpoints.passing = True
    loop, _, _ = make([2.0] * 40, checkpoints=checkpoints)
    assert not loop.run(BATCHES)[1] and checkpoints.steps == [40]


def test_a_last_save_that_fails_is_tried_again_after_a_pause(make, monkeypatch):
    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    checkpoints = Saved()
    checkpoints.failing_steps = {40}
    loop, _, _ = make([2.0] * 40, checkpoints=checkpoints)
    assert loop.run(BATCHES)[1] and checkpoints.failed_saves == 3
    assert len(pauses) == 2 and all(pauses)


def test_many_skipped_steps_in_a_row_end_the_run_and_their_lines_are_json(make, tmp_path):
    loop, _, _ = make([2.0] * 10 + [float("nan")] * 30)
    assert "10 steps in a row were skipped" in loop.run(BATCHES)[1]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_metrics(tmp_path)[-1]["loss"] is None


def test_a_run_that_was_killed_after_its_last_checkpoint_has_no_step_left(make):
    loop, _, _ = make([], Start(TrainState(40, {}, (), 0), step=40, tokens=123, seconds=5.0))  # pyright: ignore
    run, _ = loop.run(iter(()))
    assert run.tokens_after(40) == 123 and run.clock.seconds == pytest.approx(5, abs=1)
