"""Test tools.tune: its decisions from numbers, its runs of train.py, and that a second start repeats none."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from options.command_line import parse
from options.files import load_config
from options.schema import with_options
from tests.commands import run, write_folder
from tools import tune
from tools.noise import NoiseScale
from tools.tune import Point, Runs, batch_for, difference, frontier, knee, rate_for, windows

FAST = Point(16, "none", 100.0, 8.0)
NEARLY, SLOW, WORSE = Point(8, "none", 96.0, 4.0), Point(2, "block", 50.0, 2.0), Point(4, "none", 90.0, 5.0)


def test_the_micro_batch_is_the_least_memory_that_is_nearly_as_fast_as_the_fastest():
    assert frontier([FAST, WORSE, NEARLY, SLOW]) == [SLOW, NEARLY, FAST]
    assert knee([FAST, WORSE, NEARLY, SLOW]) == NEARLY and knee([FAST, SLOW]) == FAST


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (None, 1024),
        (NoiseScale(9_000, 5_000, 20_000), 1024),  # 2,048 would need up to 1.41 times the tokens of tiny steps
        (NoiseScale(60_000, 41_000, 80_000), 8192),
        (NoiseScale(600, 300, 900), 1024),
        (NoiseScale(400, 300, 500), 512),
        (NoiseScale(40, 30, 50), 256),  # the rows of 256 tokens cannot be halved
        (NoiseScale(math.inf, 5_000, math.inf), 1024),
    ],
)
def test_the_batch_follows_from_the_noise_scale_s_interval(noise, expected):
    assert batch_for(1024, 256, noise) == expected


@pytest.mark.parametrize(
    ("half", "twice", "expected"),
    [
        ([3.1, 3.2, 3.3], [3.1, 3.2, 3.3], 1.0),
        ([2.9, 3.01, 3.2], [3.1, 3.2, 3.3], 1.0),  # better on average, but the interval has zero
        ([2.9, 3.0, 3.11], [3.1, 3.2, 3.3], 0.5),
        ([3.1, 3.2, 3.3], [2.9, 3.0, 3.11], 1.0),  # short runs prefer higher rates
        ([3.1, 3.2, 3.3], [2.9, math.inf, 3.1], 1.0),
    ],
)
def test_other_rates_must_be_lower_and_better_with_their_interval(half, twice, expected):
    assert rate_for({0.5: half, 1.0: [3.0, 3.1, 3.2], 2.0: twice})[0] == expected


def test_the_interval_of_a_difference_is_student_s_of_pairs():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 3))
    expected = stats.ttest_rel(theirs, ours).confidence_interval(0.95)
    assert difference(list(theirs), list(ours)) == pytest.approx((np.mean(theirs - ours), *expected))


def test_the_noise_scale_is_of_the_later_half_of_the_steps_measured_so_far():
    of = lambda noise: {"signal": {"all": 2.0}, "noise": {"all": noise}, "coherence_running": noise / 100}
    groups = {"groups": {"matrices": {"snr": 0.5}}}
    lines = [{"step": step, "diagnostics": of(10.0 * step) | groups} for step in range(1, 49)]
    lines[40]["diagnostics"] |= {"signal": {"all": None}, "noise": {"all": None}}  # a skipped step
    found = windows([{"step": 1, "loss": 3.0}, *lines])
    assert [(part.first, part.last) for part in found] == [(9, 16), (17, 32), (25, 48)]
    assert found[0].noise.value == pytest.approx(10 * 12.5 / 2) and found[0].coherence == pytest.approx(1.25)
    assert found[2].noise.value == pytest.approx(10 * np.mean([*range(25, 41), *range(42, 49)]) / 2)


class Trained:
    """A stand-in for train.py, with the configs that it was called with. Runs of 16 rows do not fit, higher rates are
    better, and the noise scale is 12,000 tokens."""

    def __init__(self):
        self.configs, self.interrupted_at = [], 0

    def run_train(self, words, log, may_fail):
        config, _ = parse("", argv=words)
        self.configs.append(config)
        if len(self.configs) == self.interrupted_at:
            raise KeyboardInterrupt
        fits, folder = config.batch.rows_per_device != 16, Path(config.run_dir)
        line = {"tokens_per_second": 1000.0 * (config.model.remat == "none") + config.batch.rows_per_device}
        line["diagnostics"] = {"signal": {"all": 0.1}, "noise": {"all": 1200.0}, "coherence_running": 0.1}
        line["diagnostics"]["groups"] = {"matrices": {"snr": 0.4}}
        lines = [{"step": step, "time": 0.0, **line} for step in range(1, config.steps + 1)]
        lines[-1]["val_loss"] = 3.0 - config.optimizer.embed.peak_rate + config.seed / 10
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines * fits))
        return {"fits": fits, "memory": 2**20 * config.batch.rows_per_device, "seconds": 1.0}


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Trained:
    monkeypatch.chdir(write_folder(tmp_path))
    trained = Trained()
    monkeypatch.setattr(tune, "SIZES", 2)
    monkeypatch.setattr(tune, "run_train", trained.run_train)
    return trained


def start(**values) -> None:
    """Start the tool on one device."""
    config = with_options(load_config("tiny.py")[0], values)
    tune.tune(Runs(config, "tiny.py", Path("out"), 1, "cpu"), 32, ["python", "train.py", "--config=tiny.py"])


def test_each_question_trains_with_its_options_and_the_answers_are_options(trained, capsys):
    start(steps=1200)
    speed, noise, rates = trained.configs[:9], trained.configs[9], trained.configs[10:]
    tried = [(remat, rows) for remat in ("none", "products", "block") for rows in (16, 8, 4)]
    assert [(of.model.remat, of.batch.rows_per_device) for of in speed] == tried
    assert (noise.steps, noise.diagnostics.every_steps, noise.optimizer.schedule.kind) == (64, 1, "constant")
    assert noise.batch.rows_per_device == 2 and noise.batch.tokens_per_step == 512
    # Four times the batch, so rates start at twice the config's, over as many tokens.
    assert {(of.batch.tokens_per_step, of.steps, of.optimizer.schedule.kind) for of in rates} == {
        (2048, 16, "warmup_constant_warmdown")
    }
    tried = [(seed, pytest.approx(0.2 * factor)) for seed in range(3) for factor in (1, 2, 4)]
    assert [(of.seed, of.optimizer.embed.peak_rate) for of in rates] == tried
    assert {of.optimizer.embed.beta2 for of in trained.configs} == {0.995}
    printed, written = capsys.readouterr().out, Path("out/tune.md").read_text()
    command = next(line for line in written.splitlines() if line.startswith("    python train.py --config=tiny.py"))
    assert command in printed and "| 16 |" not in written
    config, _ = parse("", argv=command.split()[2:])
    chosen = (config.batch.rows_per_device, config.model.remat, config.batch.tokens_per_step, config.steps)
    assert chosen == (4, "none", 2048, 300) and config.optimizer.embed.peak_rate == pytest.approx(0.4)
    assert {path.name for path in Path("out").glob("*.png")} == {"micro-batch.png", "batch.png", "rate.png"}


def test_trials_of_rates_take_at_most_half_of_the_run(trained):
    runs = lambda steps: Runs(with_options(load_config("tiny.py")[0], {"steps": steps}), "tiny.py", Path("out"), 1, "")
    assert "144 steps, more than 50% of the run's 287" in tune.choose_rates(runs(287), {}, 16)[1]
    assert not trained.configs
    trained.interrupted_at = 1
    with pytest.raises(KeyboardInterrupt):
        tune.choose_rates(runs(288), {}, 16)


def test_a_complete_run_is_not_repeated_if_the_disk_does_not_answer(trained, unanswered):
    runs = Runs(load_config("tiny.py")[0], "tiny.py", Path("out"), 1, "cpu")
    first = runs.train("one", {}, fresh=True)
    unanswered.add("tune.json")
    with pytest.raises(OSError, match="Stale"):
        runs.train("one", {}, fresh=True)
    unanswered.clear()
    assert runs.train("one", {}, fresh=True) == first and len(trained.configs) == 1


@pytest.mark.medium
def test_a_second_start_repeats_no_complete_run_and_other_options_repeat_them(trained):
    trained.interrupted_at = 12
    with pytest.raises(KeyboardInterrupt):
        start(steps=1200)
    start(steps=1200)
    assert len(trained.configs) == 20 and trained.configs[11] == trained.configs[12]
    assert len({of.run_dir for of in trained.configs}) == 19
    start(steps=1200)
    assert len(trained.configs) == 20
    trained.interrupted_at = 21
    with pytest.raises(KeyboardInterrupt):
        start(steps=1200, **{"model.depth": 1})


@pytest.mark.parametrize(
    ("program", "may_fail", "expected"),
    [
        ("pass", False, True),
        ("print('RESOURCE_EXHAUSTED: out of memory'); sys.exit(1)", False, False),
        ("sys.exit(1)", True, True),
        ("sys.exit(1)", False, 1),
        ("print('--steps is wrong'); sys.exit(2)", True, 2),
    ],
)
def test_a_run_that_ends_badly_does_not_fit_or_ends_the_command(
    tmp_path, monkeypatch, capsys, program, may_fail, expected
):
    (tmp_path / "train.py").write_text(f"import os, sys\n{program}\n")
    monkeypatch.setattr(tune, "ROOT", tmp_path)
    if expected is True or expected is False:
        record = tune.run_train([], tmp_path / "out" / "log", may_fail)
        assert record["fits"] == expected and record["memory"] > 2**20
        return
    with pytest.raises(SystemExit) as end:
        tune.run_train([], tmp_path / "out" / "log", may_fail)
    assert end.value.code == expected and str(tmp_path / "out" / "log") in capsys.readouterr().err


@pytest.mark.medium
def test_it_tunes_a_run_with_train_py(tmp_path, monkeypatch, capsys):
    """Train in this process."""

    def run_train(words: list[str], log: Path, may_fail: bool) -> dict:
        assert run("train", monkeypatch, *words, devices=1) == 0
        return {"fits": True, "memory": tune.GIB, "seconds": 1.0}

    monkeypatch.setattr(tune, "run_train", run_train)
    monkeypatch.chdir(write_folder(tmp_path))
    monkeypatch.setattr(tune, "REMATS", ("block",))
    monkeypatch.setattr(tune, "SIZES", 1)
    monkeypatch.setattr(tune, "SEEDS", 2)
    monkeypatch.setattr(tune, "FACTORS", (1.0,))
    monkeypatch.setattr(sys, "argv", ["tune", "--config=tiny.py", "--out=out", "--trial=16", "--model.depth=1"])
    assert tune.main() == 0
    written = Path("out/tune.md").read_text()
    assert (
        "    python train.py --config=tiny.py --model.depth=1 --batch.rows_per_device=16 --model.remat=block" in written
    )
    assert "| 17 to 32 | " in written and len(list(Path("out").glob("*/metrics.jsonl"))) == 4
    monkeypatch.setattr(tune, "run_train", None)  # nothing trains again
    assert tune.main() == 0 and Path("out/tune.md").read_text() == written
