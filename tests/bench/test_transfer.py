"""Test minima and slopes on values with known answers, and bench.transfer on invented and on tiny runs."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import minima, transfer
from bench.minima import minimum, slope
from configs.exit_codes import Exit
from configs.schema import UserError
from run.lines import Events
from tests.test_train import CONFIG, write_folder

SIZES = ("--widths", "32", "64", "--depths", "2", "4", "--factors", "0.125", "0.5", "1", "2", "8")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the current folder, with a config and text to train on."""
    monkeypatch.chdir(write_folder(tmp_path, CONFIG.replace("steps=120", "steps=12")))
    return tmp_path


def command(monkeypatch, module, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    return module.main()


def invented(monkeypatch, bits_of) -> list[Path]:
    """Let the runs end with `bits_of(config, seed)`, and diverge if that is infinite. Return the trained folders."""
    trained = []

    def train_all(runs, at_once):
        for recipe, seed in runs:
            folder, bits, steps = recipe.run_dir(seed), bits_of(recipe.config, seed), recipe.config.steps
            if (folder / "summary.json").exists():
                continue
            folder.mkdir()
            trained.append(folder)
            line = {"step": steps, "time": 0.0, "epochs": {"text": 0.5 * steps}}
            if math.isfinite(bits):
                (folder / "metrics.jsonl").write_text(json.dumps(line | {"val_bpb": bits}) + "\n")
                (folder / "summary.json").write_text("{}")
            else:
                (folder / "metrics.jsonl").write_text(json.dumps(line | {"skipped_steps": 10}) + "\n")
                Events(folder).add("stop", steps, code=Exit.FAILED)
                raise SystemExit(Exit.FAILED)

    monkeypatch.setattr(minima, "train_all", train_all)
    return trained


def test_a_minimum_is_the_vertex_of_a_parabola_unless_it_is_at_an_end_or_next_to_a_diverged_run():
    x = [-3.0, -1.0, 0.0, 2.0]
    assert minimum(x, [0.2 * (a + 0.6) ** 2 + 1.3 for a in x]) == (pytest.approx(-0.6), pytest.approx(1.3))
    assert minimum([0, 1, 2], [1.0, 1.1, 1.2]) == (pytest.approx(math.nan, nan_ok=True), 1.0)
    assert minimum([0, 1, 2], [1.2, 1.1, math.inf]) == (1, 1.1)
    assert math.isnan(minimum([0, 1, 2], [math.inf] * 3)[0])


def test_a_slope_s_interval_covers_it_in_95_percent_of_draws():
    chance, x = np.random.default_rng(0), [5, 6, 7, 8] * 2
    fits = [slope(x, (-0.3 * np.array(x) + chance.normal(0, 0.2, 8)).tolist()) for _ in range(2000)]
    assert 0.93 < np.mean([fit["interval"][0] < -0.3 < fit["interval"][1] for fit in fits]) < 0.97
    assert slope([1, 2, 3], [1, math.nan, 3]) is None and slope([1, 1, 1], [1, 2, 3]) is None


def test_a_best_rate_that_falls_with_the_width_and_not_with_the_depth_is_found(folder, monkeypatch, capsys):
    def bits(config, seed):
        """Have the best factor (width / 32)^-0.5 / 2."""
        optimizer = config.optimizer
        factors = optimizer.muon.peak_rate / 0.02, optimizer.embed.peak_rate / 0.2
        (factor,) = {round(factor, 9) for factor in factors}
        away = math.log2(factor) + 0.5 * math.log2(config.model.width / 32) + 0.5 + 0.01 * (-1) ** seed
        return math.inf if factor == 8 and config.model.depth == 4 else 1.4 + 0.05 * away**2

    trained = invented(monkeypatch, bits)
    words = ("--recipe=tiny.py", *SIZES, "--seeds=2", "--groups", "embed", "muon")
    assert command(monkeypatch, transfer, *words) == Exit.COMPLETE
    made = json.loads(Path("runs/transfer/transfer.json").read_text())
    width, depth = (made["exponents"][along] for along in ("width", "depth"))
    assert width["value"] == pytest.approx(-0.5) and 0 < width["error"] < 0.02
    assert depth["value"] == pytest.approx(0, abs=1e-6) and depth["interval"][0] < 0 < depth["interval"][1]
    printed = capsys.readouterr().out
    assert "width: the best rate moves: best factor as width^p, p -0.5 [" in printed
    assert (
        "depth: the best rate is not shown to move" in printed
        and "| 32 x 4 | " in printed
        and "| diverged |" in printed
    )
    (deep,) = (of for of in made["sizes"] if of["depth"] == 4)
    assert deep["bits"]["8.0"] == [None, None] and deep["mean"] == pytest.approx(-0.5)
    assert len(trained) == 3 * 5 * 2


def test_mistakes_are_refused_before_any_run(folder, monkeypatch):
    for words, reason in (
        (("--widths", "20", "32"), "--widths: 20 is not a multiple of the recipe's head_dim=16"),
        (("--groups", "muno"), "there is no --optimizer.muno.peak_rate; groups: embed, "),
    ):
        with pytest.raises(UserError, match=reason):
            command(monkeypatch, transfer, "--recipe=tiny.py", *words)
    assert not Path("runs").exists()


@pytest.mark.medium
def test_tiny_networks_train_at_three_rates_and_one_diverges(folder, monkeypatch, capsys):
    words = ("--recipe=tiny.py", "--widths=32", "--depths=2", "--factors", "0.5", "1", "1e30", "--at_once=2")
    for complete in (0, 2):
        assert command(monkeypatch, transfer, *words) == Exit.COMPLETE
        assert f"3 runs, {complete} of them complete" in capsys.readouterr().out
    (size,) = json.loads(Path("runs/transfer/transfer.json").read_text())["sizes"]
    slow, usual, diverged = (values[0] for values in size["bits"].values())
    assert slow > usual and diverged is None and size["mean"] == 0
