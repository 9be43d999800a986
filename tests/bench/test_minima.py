"""Test minima and slopes on values with known answers, and bench.transfer and bench.scaling, which rest on them, on
invented and on tiny runs."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import minima, scaling, transfer
from bench.minima import minimum, slope
from bench.scaling import Law, fitted
from configs.command_line import Exit
from configs.nanochat import scaling_parameters
from configs.schema import UserError
from run.record import Events
from tests.test_train import CONFIG, ROOT, write_folder

SIZES = ("--widths", "32", "64", "--depths", "2", "4", "--factors", "0.125", "0.5", "1", "2", "8")
PARAMETERS = np.repeat([0.3e6, 0.9e6, 2.1e6], 4)
TOKENS = PARAMETERS * np.tile([3, 6, 12, 24], 3)
LAW = Law(0.6, 0.5, 0.35, 0.7, 0.28)
DIAL = f"{ROOT}/configs/nanochat.py --data.source=text --model.vocab_size=300 --model.head_dim=64 --model.dtype=float32"
DIAL += " --batch.sequence_length=32 --batch.rows_per_device=2 --eval.tokens=2000 --eval.sample_tokens=8"


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
    assert "depth: the best rate is not shown to move" in printed
    assert "| 32 x 4 | " in printed and "| diverged |" in printed
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


def test_a_law_without_noise_is_found_again_and_its_optimum_is_lowest_at_equal_products():
    n, d = (values / np.exp(np.log(values).mean()) for values in (PARAMETERS, TOKENS))
    assert fitted(n, d, LAW.loss(n, d)) == pytest.approx(LAW, rel=1e-3)
    best, shifts = LAW.optimum(1.7), np.exp(np.linspace(-0.5, 0.5, 101))
    assert np.argmin(LAW.loss(1.7 * shifts, best / shifts)) == 50


@pytest.mark.medium
def test_the_law_and_the_batch_s_exponent_of_invented_runs_are_found(folder, monkeypatch, capsys):
    def bits(config, seed):
        """Have the best step of 64 x tokens^0.25."""
        tokens, n = config.steps * config.batch.tokens_per_step, scaling_parameters(config.model)
        away = math.log2(config.batch.tokens_per_step / (64 * tokens**0.25))
        return 0.6 + (n / 1e3) ** -0.35 + (tokens / 1e3) ** -0.28 + 0.002 * away**2

    trained = invented(monkeypatch, bits)
    monkeypatch.setattr(scaling, "DRAWS", 30)
    batches = [str(2.0**-i) for i in range(2, 8)]
    words = (f"--recipe={DIAL}", "--horizons", "3", "6", "24", "--batches", *batches)
    assert command(monkeypatch, scaling, *words) == Exit.COMPLETE
    made = json.loads(Path("runs/scaling/scaling.json").read_text())
    assert made["law"]["a"]["value"] == pytest.approx(0.35, abs=0.02)
    assert made["law"]["b"]["value"] == pytest.approx(0.28, abs=0.02)
    assert made["batch"]["value"] == pytest.approx(0.25, abs=0.01) and made["batch"]["interval"][1] < 0.383
    assert len(trained) == 3 * 3 * 6
    printed = capsys.readouterr().out
    assert "best step as tokens^p, p 0.2" in printed and "0 of 9 best steps" in printed and "beyond 4 times" in printed


def test_options_of_a_cell_follow_the_dial(folder):
    (cell,) = scaling.cells_of(scaling.Arguments(DIAL, depths=(12,), horizons=(12,), batches=(1.0,)))
    config = cell.recipes[0].config
    assert (cell.dial, config.batch.tokens_per_step, config.optimizer.schedule.warmup_steps) == (2**19, 2**19, 40)
    assert config.optimizer.muon.weight_decay == pytest.approx(0.28) and config.optimizer.embed.peak_rate == 0.3
    (cell,) = scaling.cells_of(scaling.Arguments(DIAL, depths=(12,), horizons=(3,), batches=(0.25,)))
    config = cell.recipes[0].config
    assert config.batch.tokens_per_step == cell.dial / 4 == 2**16  # 2^19 x (1/4)^0.383 is nearly 2^18
    assert config.optimizer.muon.weight_decay == pytest.approx(0.28 * 4 / math.sqrt(8))
