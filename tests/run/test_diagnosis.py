"""Test the noise scale of a window of steps, and its interval."""

import math

import numpy as np
import pytest
from scipy.special import stdtrit

from configs.schema import GroupConfig, OptimizerConfig
from run.diagnosis import BLOCKS, WINDOW, Diagnosis, T, from_moments, noise_scale


def course(signal: float, noise: float, steps: int, spread: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return estimates of |G|^2 and tr Sigma that scatter around the truth."""
    generator = np.random.default_rng(seed)
    scattered = lambda value, by: value + by * generator.standard_normal(steps)
    return scattered(signal, spread * signal), scattered(noise, 0.1 * noise)


def test_the_truth_is_in_the_interval_as_often_as_it_should():
    scales = [noise_scale(*course(2.0, 1000.0, 64, 0.5, seed)) for seed in range(400)]
    inside = [scale.low <= 500 <= scale.high for scale in scales if scale and math.isfinite(scale.high)]
    assert len(inside) > 390 and 0.9 < np.mean(inside) < 0.99


def test_a_signal_that_may_be_zero_gives_a_lower_bound_and_few_steps_give_none():
    bound = noise_scale(*course(0.02, 1000.0, 64, 100.0))
    assert bound and bound.high == math.inf and 0 < bound.low < 1000 / 0.02
    negative = noise_scale([-1.0] * 20, [3.0] * 20)  # negative values are reported as they come
    assert negative and negative.value == negative.high == math.inf
    assert noise_scale([1.0] * (BLOCKS - 1), [1.0] * (BLOCKS - 1)) is None  # too few steps


def test_the_quantile_is_student_s():
    assert pytest.approx(stdtrit(BLOCKS - 1, 0.975), rel=1e-14) == T


MOMENTS = {name: {"embed": of} for name, of in zip(("first", "second", "first_weight", "second_weight"), (2, 3, 1, 1))}


def measured(signal: float, noise: float) -> dict:
    quantities = {"gradient_norm": {"embed": 1.0, "matrices": 2.0}, "update_norm": {"embed": 0.1}}
    both = {"signal": {"embed": signal / 2, "all": signal}, "noise": {"embed": noise / 4, "all": noise}}
    both |= {"coherence_running": 0.5, "clipped": 1.0, "moments": MOMENTS}
    return both | {"groups": quantities, "blocks": {"gradient_norm": {"0": 2.0}}}


def test_a_resumed_run_has_the_window_that_it_had():
    signals, noises = course(2.0, 1000.0, WINDOW + 20, 0.3)
    diagnosis, lines = Diagnosis([], OptimizerConfig()), []
    for step, values in enumerate(zip(signals, noises)):
        lines.append({"step": step, "diagnostics": diagnosis.line(measured(*values), 100)})
    continued = Diagnosis(lines[:-1], OptimizerConfig()).line(measured(signals[-1], noises[-1]), 100)
    assert continued == lines[-1]["diagnostics"] and not any("moments" in name for name in continued)
    assert continued["noise_scale"] == pytest.approx(np.mean(noises[-WINDOW:]) / np.mean(signals[-WINDOW:]))
    assert continued["groups"]["embed"]["noise_scale"] == pytest.approx(continued["noise_scale"] / 2)
    assert continued["groups"]["embed"]["update_norm"] == 0.1 and continued["blocks"] == {"0": {"gradient_norm": 2.0}}


def test_steps_that_measured_nothing_are_left_out():
    lines = [{"step": 1, "diagnostics": {"signal": {"all": None}, "noise": {"all": None}}}]
    diagnosis = Diagnosis(lines, OptimizerConfig())
    line = [diagnosis.line(measured(math.nan, 1.0), 0) for _ in range(BLOCKS)][-1]
    assert line["noise_scale"] is None and "noise_scale_moments" not in line


@pytest.mark.parametrize("before", [0, 200], ids=["zero start", "moments of another run"])
def test_moments_tell_signal_from_noise_on_average(before):
    """Run AdamW 4,000 times for 12 steps on gradients with a known mean and covariance. The mean estimates must be
    within four standard errors of the truth, although v still depends on its zero start, or on a run `before`."""
    generator, tokens = np.random.default_rng(0), 50
    truth, deviation = {"embed": np.ones(4), "lm_head": np.full(6, 0.5)}, {"embed": 3.0, "lm_head": 5.0}
    optimizer = OptimizerConfig(embed=GroupConfig(0.1, 0.8, 0.95), lm_head=GroupConfig(0.1, 0.9, 0.99))
    moments: dict[str, dict] = {name: {} for name in MOMENTS}
    for name, mean in truth.items():
        options, first, second = getattr(optimizer, name), np.zeros((4000, len(mean))), np.zeros((4000, len(mean)))
        for _ in range(before + 12):
            gradient = mean + deviation[name] / tokens**0.5 * generator.standard_normal(first.shape)
            first += (1 - options.beta1) * (gradient - first)
            second += (1 - options.beta2) * (gradient**2 - second)
        weights = 1 - np.array([options.beta1, options.beta2]) ** (before + 12)
        for kind, value in zip(MOMENTS, ((first**2).sum(1), second.sum(1), *weights)):
            moments[kind][name] = value
    estimated = from_moments(moments, optimizer, tokens)
    signal = {name: np.sum(mean**2) for name, mean in truth.items()}
    noise = {name: len(mean) * deviation[name] ** 2 for name, mean in truth.items()}
    for estimates, known in ((estimated["moments_signal"], signal), (estimated["moments_noise"], noise)):
        for name, value in {**known, "all": sum(known.values())}.items():
            error = np.std(estimates[name]) / 4000**0.5
            assert abs(np.mean(estimates[name]) - value) < 4 * error and error < 0.02 * value, name


@pytest.mark.parametrize(("beta1", "weight"), [(0.0, 1.0), (0.8, 0.0), (0.8, float(np.float32(0.2)))])
def test_moments_of_one_gradient_show_no_noise(beta1, weight):
    moments = MOMENTS | {name: {"embed": weight} for name in ("first_weight", "second_weight")}
    estimated = from_moments(moments, OptimizerConfig(embed=GroupConfig(0.1, beta1)), 100)
    assert math.isnan(estimated["moments_noise"]["all"])


def test_steps_of_one_gradient_take_the_noise_scale_from_the_moments():
    diagnosis = Diagnosis([], OptimizerConfig())
    line = [diagnosis.line(measured(math.nan, math.nan), 100) for _ in range(BLOCKS)][-1]
    assert line["noise_scale"] is None and "moments" not in line
    assert line["noise_scale_moments"] > 0 and line["groups"]["embed"]["noise_scale_moments"] > 0
    assert "noise_scale_moments" not in line["groups"]["matrices"]
