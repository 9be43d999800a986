"""Test comparisons of recipes: refusals, the statistics, and the command on two tiny recipes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from bench import compare, recipes
from bench.compare import holm
from bench.nanochat import Arguments
from options.command_line import parse
from system.errors import Exit, UserError
from tests.commands import CONFIG, write_folder

WIDER = "tiny.py --model.width=64 --model.head_dim=32"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder, with a config and text to train on."""
    monkeypatch.chdir(write_folder(tmp_path, CONFIG.replace("steps=120", "steps=10")))
    return tmp_path


def run(monkeypatch, *words: str) -> int:
    """Return the exit code of the command, run in this process."""
    monkeypatch.setattr("sys.argv", ["bench.compare", *words])
    return compare.main()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("tiny.py --model.kv_heads=7", "kv_heads"),
        ("tiny.py --checkpoint.keep=9", "recipes are the same"),
        ("tiny.py --steps=51", "tokens of the run: 5120 and 26112"),
        ("tiny.py --data.packing=whole", "data.packing: stream and whole"),
    ],
)
def test_recipes_that_cannot_be_compared_are_refused_before_any_run(folder, monkeypatch, other, reason):
    with pytest.raises(UserError, match=reason):
        run(monkeypatch, "tiny.py", other)
    assert not (folder / "runs").exists()


def test_the_interval_is_student_s_of_pairs_and_covers_as_often_as_it_says():
    ours, theirs = np.random.default_rng(0).normal(size=(2, 2000, 4))
    theirs += ours + 0.3
    found = [compare.compare("b", "a", list(b), list(a)) for a, b in zip(ours, theirs)]
    expected = stats.ttest_rel(theirs[0], ours[0])
    assert found[0].p == pytest.approx(expected.pvalue)
    assert found[0].interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    covered = [of.interval[0] <= 0.3 <= of.interval[1] for of in found]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_with_equal_seconds_a_slower_recipe_takes_fewer_steps_and_the_times_are_kept(folder, monkeypatch):
    started, timed = [], []

    def trained(command: list, **_) -> SimpleNamespace:
        config, _ = parse("", argv=command[2:])
        started.append((config.model.width, config.steps))
        Path(config.run_dir).mkdir(parents=True)
        (Path(config.run_dir) / "summary.json").write_text(json.dumps({"val_bpb": 1.0 + config.seed}))
        return SimpleNamespace(returncode=0)

    def step_seconds(timed_recipes: list) -> list[float]:
        timed.append([recipe.config.model.width for recipe in timed_recipes])
        return [0.5, 0.625]

    monkeypatch.setattr(recipes, "subprocess", SimpleNamespace(run=trained, STDOUT=None))
    monkeypatch.setattr(compare, "step_seconds", step_seconds)
    words = ("tiny.py", WIDER, "--seeds=2", "--out=compared", "--equal=seconds")
    assert run(monkeypatch, *words) == run(monkeypatch, *words) == Exit.COMPLETE
    assert started == [(32, 10), (64, 8)] * 2 and timed == [[32, 64]]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("tiny.py", f"{WIDER} --steps=9"), "--equal=seconds chooses its steps"),
        (("tiny.py --batch.rows_per_device=auto", WIDER), "times a step, which needs --batch.rows_per_device=ROWS"),
    ],
)
def test_recipes_whose_seconds_cannot_be_made_equal_are_refused(folder, monkeypatch, texts, reason):
    with pytest.raises(UserError, match=reason):
        run(monkeypatch, *texts, "--equal=seconds")
    assert not (folder / "runs").exists()


def test_steps_are_timed_in_turn_and_the_median_counts(folder, monkeypatch):
    """The first steps and one slow step do not count. A clock stands in for the processor's."""
    now, order = [0.0], []

    def make_step(recipe) -> Callable[[int], None]:
        width = recipe.config.model.width

        def step(number: int) -> None:
            order.append(width)
            now[0] += 9 if number in (0, 5) else width

        return step

    monkeypatch.setattr(compare, "time", SimpleNamespace(process_time=lambda: now[0]))
    monkeypatch.setattr(compare, "make_step", make_step)
    timed = [recipes.read_recipe(text, folder) for text in ("tiny.py", WIDER)]
    assert compare.step_seconds(timed) == [32, 64]
    assert order == [32, 64] * (compare.WARMUP_STEPS + compare.TIMED_STEPS)


def test_a_recipe_takes_one_step_at_each_call(folder, monkeypatch):
    taken = []
    block_until_ready = recipes.jax.block_until_ready
    monkeypatch.setattr(
        recipes, "jax", SimpleNamespace(block_until_ready=lambda of: taken.append(of) or block_until_ready(of))
    )
    step = recipes.make_step(recipes.read_recipe("tiny.py", folder))
    step(0)
    step(1)
    assert len(taken) == 2 and int(taken[1][0].step) == 2


def test_holm_corrects_for_the_number_of_comparisons():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([0.2]) == [0.2]


def test_runs_are_paired_by_seed_and_made_once(folder, monkeypatch, capsys):
    """A stand-in for train.py takes the words that it would get. Its bits depend on the seed and the width."""
    started = []

    def trained(command: list, **_) -> SimpleNamespace:
        config, _ = parse("", argv=command[2:])
        started.append((command[1], config.seed, config.model.width))
        bits = config.seed + config.model.width * (1 + config.seed / 100)
        Path(config.run_dir).mkdir(parents=True)
        (Path(config.run_dir) / "summary.json").write_text(json.dumps({"val_bpb": bits}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(recipes, "subprocess", SimpleNamespace(run=trained, STDOUT=None))
    words = ("tiny.py", WIDER, "--seeds=2", "--out=compared")
    assert run(monkeypatch, *words) == run(monkeypatch, *words) == Exit.COMPLETE
    assert started == [(str(recipes.ROOT / "train.py"), seed, width) for seed in (0, 1) for width in (32, 64)]
    result = json.loads((folder / "compared" / "compare.json").read_text())
    (of,) = result["comparisons"]
    assert of["by_seed"] == pytest.approx([32, 32.32]) and of["recipe"] == WIDER
    table = (folder / "compared" / "compare.md").read_text()
    assert f"| `{WIDER}` | {of['difference']:+.4f} [" in table and capsys.readouterr().out.count(table) == 2


def test_nanochat_s_own_loop_is_a_recipe_that_begins_again_after_an_interruption(folder, monkeypatch):
    """A stand-in for bench.nanochat takes the words that it would get, and is killed at its first start."""
    started = []

    def trained(command: list, **_) -> SimpleNamespace:
        is_nanochat = command[1:3] == ["-m", "bench.nanochat"]
        if is_nanochat:
            config, arguments = parse("", Arguments, argv=command[3:])
            out = Path(arguments.out)
        else:
            config, _ = parse("", argv=command[2:])
            out = Path(config.run_dir)
        started.append((is_nanochat, config.seed, config.steps, (out / "metrics.jsonl").exists()))
        out.mkdir(parents=True)
        if len(started) == 2:
            (out / "metrics.jsonl").touch()
            return SimpleNamespace(returncode=137)
        (out / "summary.json").write_text(json.dumps({"val_bpb": 2.0 + config.seed / 10 + is_nanochat}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(recipes, "subprocess", SimpleNamespace(run=trained, STDOUT=None))
    words = ("tiny.py", "nanochat tiny.py --rate_factor=11.3", "--seeds=2", "--out=compared")
    with pytest.raises(SystemExit, match="137"):
        run(monkeypatch, *words)
    assert run(monkeypatch, *words) == Exit.COMPLETE
    ours, theirs = [(False, seed, 10, False) for seed in (0, 1)], [(True, seed, 10, False) for seed in (0, 1)]
    assert started == [ours[0], theirs[0], theirs[0], ours[1], theirs[1]]
    (of,) = json.loads((folder / "compared" / "compare.json").read_text())["comparisons"]
    assert of["recipe"] == "nanochat tiny.py --rate_factor=11.3" and of["by_seed"] == pytest.approx([1, 1])


def test_a_wrong_option_of_nanochat_s_loop_is_refused_before_any_run(folder, monkeypatch):
    with pytest.raises(UserError, match="rate_factr"):
        run(monkeypatch, "tiny.py", "nanochat tiny.py --rate_factr=2")
    assert not (folder / "runs").exists()
