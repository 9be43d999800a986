"""Test when the run is saved, and what follows a failed save."""

import itertools
from types import SimpleNamespace

import pytest

from configs.schema import CheckpointConfig
from run.hooks import Save, Watch
from run.progress import GaveUp, due_after
from run.times import Times
from tests.run.hooks.runs import TOKENS, Saved, config_of, progress

ALL = range(41)


class Run:
    """40 steps that compute nothing. Three failed saves end them."""

    def __init__(self, saved: Saved, run_dir: object, **options):
        config, self.gave_up = config_of(run_dir, **options), ""
        run, save = progress(config), Save(config, saved, "print", Watch(config, Times()))  # pyright: ignore
        save.begin(run)
        try:
            while run.step < config.steps:
                run.step += 1
                due = due_after(run.step, config, last=run.is_last, soon=run.save_soon)
                save.after_step(run, {}, due)  # pyright: ignore
            save.finish(run)
        except GaveUp as error:
            self.gave_up = f"{error}; {save.described()}"


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    monkeypatch.setattr("run.hooks.save.MOST_FAILED", 3)
    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    return pauses


@pytest.mark.parametrize(
    ("failing", "steps", "failures", "gave_up", "waits"),
    [
        ([], [10, 20, 30, 40], [], "", 0),
        ([10, 16], [20, 30, 40], [1, 2], "", 0),  # retried after the next logged step detects the failure
        ([40], [10, 20, 30], [1, 2, 3], "the newest checkpoint is of step 30", 2),  # after a pause
        (ALL, [], [1, 2, 3], "no checkpoint was saved", 0),
    ],
)
def test_a_save_that_fails_is_tried_again_and_the_third_in_a_row_ends_the_run(
    tmp_path, pauses, messages, failing, steps, failures, gave_up, waits
):
    saved = Saved(failing)
    run = Run(saved, tmp_path)
    assert saved.steps == steps and len(pauses) == waits and all(pauses)
    assert [int(text.split(" save(s) in a row failed: the disk is full")[0]) for text in messages] == failures
    assert run.gave_up == (f"3 save(s) in a row failed: the disk is full; {gave_up}" if gave_up else "")
    assert all(saved.facts[step]["tokens"] == step * TOKENS for step in steps)


def test_a_disk_that_fails_for_a_while_does_not_end_the_run(tmp_path, monkeypatch):
    saved = Saved(ALL)
    saved.passing = True
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: saved.failing_steps.clear())
    assert not Run(saved, tmp_path).gave_up and saved.steps == [40]


def test_minutes_make_a_checkpoint_due_after_a_step_that_is_logged(tmp_path, monkeypatch):
    clock = itertools.count(step=13.0)  # one call at the start, per logged step, and per save
    monkeypatch.setattr("run.hooks.save.time", SimpleNamespace(monotonic=lambda: next(clock)))
    saved = Saved()
    Run(saved, tmp_path, checkpoint=CheckpointConfig(every_steps=1000, every_minutes=0.5))
    assert saved.steps == [16, 31, 40]  # 39 seconds, at the third line


def test_the_end_saves_a_last_step_whose_save_never_began(tmp_path):
    saved, config = Saved(), config_of(tmp_path)
    run, save = progress(config, step=40), Save(config, saved, "print", Watch(config, Times()))  # pyright: ignore
    save.begin(run)
    save.finish(run)
    assert saved.steps == [40]
