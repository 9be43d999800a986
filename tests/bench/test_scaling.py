"""Test bench.scaling: known laws are found again, and the command on invented runs of the dial."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench import scaling
from bench.scaling import Law, fitted
from configs.exit_codes import Exit
from configs.nanochat import scaling_parameters
from tests.bench.test_transfer import command, folder, invented  # noqa: F401
from tests.test_train import ROOT

PARAMETERS = np.repeat([0.3e6, 0.9e6, 2.1e6], 4)
TOKENS = PARAMETERS * np.tile([3, 6, 12, 24], 3)
LAW = Law(0.6, 0.5, 0.35, 0.7, 0.28)
DIAL = f"{ROOT}/configs/nanochat.py --data.source=text --model.vocab_size=300 --model.head_dim=64 --model.dtype=float32"
DIAL += " --batch.sequence_length=32 --batch.rows_per_device=2 --eval.tokens=2000 --eval.sample_tokens=8"


def test_a_law_without_noise_is_found_again_and_its_optimum_is_lowest_at_equal_products():
    n, d = (values / np.exp(np.log(values).mean()) for values in (PARAMETERS, TOKENS))
    assert fitted(n, d, LAW.loss(n, d)) == pytest.approx(LAW, rel=1e-3)
    best, shifts = LAW.optimum(1.7), np.exp(np.linspace(-0.5, 0.5, 101))
    assert np.argmin(LAW.loss(1.7 * shifts, best / shifts)) == 50


@pytest.mark.medium
def test_the_law_and_the_batch_s_exponent_of_invented_runs_are_found(folder, monkeypatch, capsys):  # noqa: F811
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


def test_options_of_a_cell_follow_the_dial(folder):  # noqa: F811
    (cell,) = scaling.cells_of(scaling.Arguments(DIAL, depths=(12,), horizons=(12,), batches=(1.0,)))
    config = cell.recipes[0].config
    assert (cell.dial, config.batch.tokens_per_step, config.optimizer.schedule.warmup_steps) == (2**19, 2**19, 40)
    assert config.optimizer.muon.weight_decay == pytest.approx(0.28) and config.optimizer.embed.peak_rate == 0.3
    (cell,) = scaling.cells_of(scaling.Arguments(DIAL, depths=(12,), horizons=(3,), batches=(0.25,)))
    config = cell.recipes[0].config
    assert config.batch.tokens_per_step == cell.dial / 4 == 2**16  # 2^19 x (1/4)^0.383 is nearly 2^18
    assert config.optimizer.muon.weight_decay == pytest.approx(0.28 * 4 / math.sqrt(8))
