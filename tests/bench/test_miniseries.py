"""The power law of bench.miniseries: a known exponent, the coverage of its intervals, and a series of tiny runs."""

import json
import math
import sys

import numpy as np
import pytest

from bench import miniseries
from bench.miniseries import Point, fit
from system.errors import UserError
from system.exits import exit_code_of

FLOPS = [1e13, 1e14, 5e14, 2e15, 1e16]
EXPONENT, NOISE = 0.07, 0.01


def made_up(exponent: float, noise: float = 0.0, floor: float = 0.0, seed: int = 0) -> list[Point]:
    """Return points of a law with a floor, with noise of the logarithm."""
    chance = np.random.default_rng(seed)
    losses = [floor + 30.0 * flops**-exponent * math.exp(chance.normal(0, noise)) for flops in FLOPS]
    return [Point(depth, 1000, flops, loss) for depth, (flops, loss) in enumerate(zip(FLOPS, losses), 1)]


def test_a_known_law_is_found():
    law = fit(made_up(EXPONENT))
    assert law.exponent == pytest.approx(EXPONENT, abs=1e-12)
    assert law.loss(1e18) == pytest.approx(30.0 * 1e18**-EXPONENT, rel=1e-9)
    assert law.exponent_interval == pytest.approx((EXPONENT, EXPONENT), abs=1e-9)
    assert law.interval(1e18) == pytest.approx((law.loss(1e18),) * 2, rel=1e-6)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Of 400 series, 95% less or more three standard errors, 0.033."""
    covered = predicted = 0
    for seed in range(400):
        *points, last = made_up(EXPONENT, NOISE, seed=seed)
        law = fit(points)
        low, high = law.exponent_interval
        covered += low <= EXPONENT <= high
        low, high = law.interval(last.flops)
        predicted += low <= last.loss <= high
    assert abs(covered / 400 - 0.95) < 0.033 and abs(predicted / 400 - 0.95) < 0.033


def test_a_floor_shows_in_the_predictions_of_the_table():
    """A power law cannot follow a loss with a floor: it predicts less than is measured, and the table says so."""
    points = made_up(0.3, floor=1.0)
    row = miniseries.as_table(points).splitlines()[-1]
    predicted = fit(points[:-1]).loss(FLOPS[-1])
    assert predicted < points[-1].loss and f"{predicted:.4f}: {predicted - points[-1].loss:+.4f}" in row
    exact = miniseries.as_table(made_up(EXPONENT)).splitlines()
    assert all(row.endswith("0.0000 |") for row in exact[4:]) and exact[2].endswith("| - |")


def test_two_points_have_no_interval():
    law = fit(made_up(EXPONENT)[:2])
    assert law.exponent == pytest.approx(EXPONENT) and law.exponent_interval == (-math.inf, math.inf)
    assert law.interval(1e15)[1] == math.inf


@pytest.mark.parametrize("text", ["4", "4,2", "2,2", "0,2", "2,four", "", "2,-4"])
def test_depths_that_make_no_series_are_refused(text):
    with pytest.raises(UserError, match="--depths="):
        miniseries.read_depths(text)


TINY = "configs/nanochat.py --model.head_dim=16 --model.vocab_size=320 --data.source=configs --steps=3"
TINY += " --batch.sequence_length=64 --batch.tokens_per_step=512 --batch.rows_per_device=4 --eval.tokens=512"


@pytest.mark.slow
def test_a_series_trains_each_depth_at_its_own_width(tmp_path, monkeypatch, capfd):
    command = ["miniseries", TINY, "--depths=1,2,3", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [*command, "--hours=1e-9"])
    assert exit_code_of(miniseries.main, "") == 2  # the first depth only
    error = capfd.readouterr()
    assert "not begun after 1e-09 hours: depth 2, 3" in error.out and "sufficed for one depth" in error.err
    monkeypatch.setattr(sys, "argv", command)
    assert exit_code_of(miniseries.main, "") == 0
    content = json.loads((tmp_path / "miniseries.json").read_text())
    assert [point["depth"] for point in content["points"]] == [1, 2, 3]
    records = [json.loads(path.read_text()) for path in tmp_path.glob("*/config.json")]
    assert sorted(record["config"]["model"]["width"] for record in records) == [64, 128, 192]
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/summary.json")]
    assert {point["loss"] for point in content["points"]} == {summary["val_bpb"] for summary in summaries}
    assert (tmp_path / "miniseries.png").stat().st_size > 10_000
    assert "predicted from the smaller depths" in (tmp_path / "miniseries.md").read_text()
