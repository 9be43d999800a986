"""Test the noise scale of a window of steps, and its interval."""

import math

import numpy as np
import pytest

from training.diagnostics import BLOCKS, WINDOW, Diagnosis, noise_scale


def course(signal: float, noise: float, steps: int, spread: float, seed: int = 0) -> tuple[list[float], list[float]]:
    """Return estimates of |G|^2 and tr Sigma that scatter around the truth."""
    generator = np.random.default_rng(seed)
    scattered = lambda value, by: (value + by * generator.standard_normal(steps)).tolist()
    return scattered(signal, spread * signal), scattered(noise, 0.1 * noise)


def test_the_truth_is_in_the_interval_as_often_as_it_should():
    scales = [noise_scale(*course(2.0, 1000.0, 64, 0.5, seed)) for seed in range(400)]
    inside = [scale.low <= 500 <= scale.high for scale in scales if scale and math.isfinite(scale.high)]
    assert len(inside) > 390 and 0.93 < np.mean(inside) < 0.97


def test_a_signal_that_may_be_zero_gives_a_lower_bound_and_few_steps_give_none():
    bound = noise_scale(*course(0.02, 1000.0, 64, 100.0))
    assert bound and bound.high == math.inf and 0 < bound.low < 1000 / 0.02
    negative = noise_scale([-1.0] * 20, [3.0] * 20)  # negative values are reported as they come
    assert negative and negative.value == negative.high == math.inf
    assert noise_scale([1.0] * (BLOCKS - 1), [1.0] * (BLOCKS - 1)) is None  # too few steps


def measured(signal: float, noise: float) -> dict:
    quantities = {"gradient_norm": {"embed": 1.0, "matrices": 2.0}, "update_norm": {"embed": 0.1}}
    both = {"signal": {"embed": signal / 2, "all": signal}, "noise": {"embed": noise / 4, "all": noise}}
    both |= {"coherence_running": 0.5, "clipped": 1.0}
    return both | {"groups": quantities, "blocks": {"gradient_norm": {"0": 2.0}}}


def test_a_resumed_run_has_the_window_that_it_had():
    signals, noises = course(2.0, 1000.0, WINDOW + 20, 0.3)
    diagnosis, lines = Diagnosis(), []
    for step, values in enumerate(zip(signals, noises)):
        lines.append({"step": step, "diagnostics": diagnosis.line(measured(*values))})
    continued = Diagnosis(lines[:-1]).line(measured(signals[-1], noises[-1]))
    assert continued == lines[-1]["diagnostics"]
    assert continued["noise_scale"] == pytest.approx(np.mean(noises[-WINDOW:]) / np.mean(signals[-WINDOW:]))
    assert continued["groups"]["embed"]["noise_scale"] == pytest.approx(continued["noise_scale"] / 2)
    assert continued["groups"]["embed"]["update_norm"] == 0.1 and continued["blocks"] == {"0": {"gradient_norm": 2.0}}


def test_steps_that_measured_nothing_are_left_out():
    lines = [{"step": 1, "diagnostics": {"signal": {"all": None}, "noise": {"all": None}}}]
    diagnosis = Diagnosis(lines)
    line = [diagnosis.line(measured(math.nan, 1.0)) for _ in range(BLOCKS)][-1]
    assert line["noise_scale"] is None
