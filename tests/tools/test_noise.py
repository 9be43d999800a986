"""Test the noise scale of a window of steps, and its interval."""

import math

import numpy as np
import pytest

from tools.noise import BLOCKS, WINDOW, add_noise_scales, noise_scale


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


def test_a_step_has_the_window_of_the_newest_and_steps_that_measured_nothing_are_left_out():
    signals, noises = course(2.0, 1000.0, WINDOW + 20, 0.3)
    lines: list[dict] = [{"step": step, "loss": 1.0} for step in range(len(signals))]
    for line, signal, noise in zip(lines, signals, noises):
        line["diagnostics"] = {"signal": {"all": signal}, "noise": {"all": noise}}
    lines[-1]["diagnostics"] = {"signal": {"all": None}, "noise": {"all": None}}
    add_noise_scales([{"step": 0, "val_loss": 1.0}, *lines])
    found = [line["diagnostics"].get("noise_scale") for line in lines]
    assert found[: BLOCKS - 1] == [None] * (BLOCKS - 1) and found[BLOCKS - 1] is not None
    assert found[-2] == pytest.approx(np.mean(noises[-WINDOW - 1 : -1]) / np.mean(signals[-WINDOW - 1 : -1]))
    assert found[-1] == pytest.approx(np.mean(noises[-WINDOW:-1]) / np.mean(signals[-WINDOW:-1]))
    assert lines[-1]["diagnostics"]["noise_scale_low"] < found[-1] < lines[-1]["diagnostics"]["noise_scale_high"]
