"""The noise scale of a window of steps, and its interval."""

import math

import numpy as np
import pytest

from run.diagnosis import BLOCKS, WINDOW, Diagnosis, noise_scale


def course(signal: float, noise: float, steps: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Estimates of |G|^2 and tr Sigma that scatter about the truth."""
    generator = np.random.default_rng(seed)
    scattered = lambda value, by: value + by * generator.standard_normal(steps)
    return scattered(signal, spread * signal), scattered(noise, 0.1 * noise)


def test_the_interval_holds_the_truth_as_often_as_it_should():
    held = [
        found.low <= 500 <= found.high
        for seed in range(400)
        if (found := noise_scale(*course(2.0, 1000.0, 64, 0.5, seed))) and math.isfinite(found.high)
    ]
    assert len(held) > 390 and 0.9 < np.mean(held) < 0.99


def test_a_signal_that_cannot_be_told_from_nothing_gives_a_lower_bound():
    found = noise_scale(*course(0.02, 1000.0, 64, 100.0))
    assert found and found.high == math.inf and 0 < found.low < 1000 / 0.02
    negative = noise_scale([-1.0] * 20, [3.0] * 20)  # never clipped to a number
    assert negative and negative.value == negative.high == math.inf


def test_few_steps_give_none():
    assert noise_scale([1.0] * (BLOCKS - 1), [1.0] * (BLOCKS - 1)) is None


def measured(signal: float, noise: float) -> dict:
    quantities = {"gradient_norm": {"embed": 1.0, "matrices": 2.0}, "update_norm": {"embed": 0.1}}
    both = {"signal": {"embed": signal / 2, "all": signal}, "noise": {"embed": noise / 4, "all": noise}}
    in_adam_s = {"adam_signal": {"embed": signal, "all": signal}, "adam_noise": {"embed": 2 * noise, "all": 2 * noise}}
    return (
        both
        | in_adam_s
        | {
            "coherence_running": 0.5,
            "clipped": 1.0,
            "groups": quantities,
            "blocks": {"gradient_norm": {"0": 2.0}},
        }
    )


def test_a_run_that_goes_on_has_the_window_that_it_had():
    signals, noises = course(2.0, 1000.0, WINDOW + 20, 0.3)
    whole, lines = Diagnosis([]), []
    for step, values in enumerate(zip(signals, noises)):
        lines.append({"step": step, "diagnostics": whole.line(measured(*values))})
    continued = Diagnosis(lines[:-1]).line(measured(signals[-1], noises[-1]))
    assert continued == lines[-1]["diagnostics"]
    assert continued["noise_scale"] == pytest.approx(np.mean(noises[-WINDOW:]) / np.mean(signals[-WINDOW:]))
    assert continued["groups"]["embed"]["noise_scale"] == pytest.approx(continued["noise_scale"] / 2)
    assert continued["noise_scale_adam"] == pytest.approx(2 * continued["noise_scale"])
    assert continued["groups"]["embed"]["noise_scale_adam"] == continued["noise_scale_adam"]
    assert "noise_scale_adam" not in continued["groups"]["matrices"]
    assert continued["groups"]["embed"]["update_norm"] == 0.1 and continued["blocks"] == {"0": {"gradient_norm": 2.0}}


def test_steps_that_measured_nothing_are_left_out():
    diagnosis = Diagnosis([{"step": 1, "diagnostics": {"signal": {"all": None}, "noise": {"all": None}}}])
    for _ in range(BLOCKS):
        line = diagnosis.line(measured(math.nan, 1.0))
    assert line["noise_scale"] is None
