"""The gradient noise scale over a window of measured steps, with its interval (training/diagnostics.py)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WINDOW = 64  # most measured steps in a noise scale
BLOCKS = 8  # of the jackknife: at least this many measured steps
T = 2.364624251592784  # Student's, of BLOCKS - 1 degrees of freedom at 0.975


class NoiseScale(NamedTuple):
    """The gradient noise scale, in tokens, with an interval of about 95%."""

    value: float
    low: float
    high: float
    """Infinite if the true gradient may be zero; the noise scale is then at least `low`."""


def noise_scale(signals: Sequence[float], noises: Sequence[float]) -> NoiseScale | None:
    """Return the ratio of the means of |G|^2 and tr Sigma over several steps; a mean of ratios is biased. Return None
    for fewer than 8 steps. The 95% interval is by Student's t, from a jackknife over blocks of neighbouring steps,
    which are alike."""
    if len(signals) < BLOCKS:
        return None
    estimates = np.stack([signals, noises], 1)
    blocks = np.array_split(estimates, BLOCKS)
    left_out = np.array([np.mean(np.concatenate(blocks[:i] + blocks[i + 1 :]), axis=0) for i in range(BLOCKS)])

    def reach(values: np.ndarray) -> float:
        """Return half the width of the jackknife's interval."""
        return T * float(np.sqrt((BLOCKS - 1) / BLOCKS * np.sum((values - values.mean(0)) ** 2)))

    signal, noise = np.mean(estimates, axis=0)
    if signal - reach(left_out[:, 0]) <= 0:
        at_most = signal + reach(left_out[:, 0])
        low = max(noise - reach(left_out[:, 1]), 0.0) / at_most if at_most > 0 else 0.0
        return NoiseScale(float(noise / signal) if signal > 0 else math.inf, float(low), math.inf)
    value, spread = noise / signal, reach(left_out[:, 1] / left_out[:, 0])
    return NoiseScale(float(value), float(max(value - spread, 0.0)), float(value + spread))


def noise_scale_of(lines: Sequence[dict]) -> NoiseScale | None:
    """Return the noise scale of the steps that these lines of metrics.jsonl measured; None if they are too few."""
    measured = [line["diagnostics"] for line in lines if "diagnostics" in line]
    pairs = [(of["signal"]["all"], of["noise"]["all"]) for of in measured if of["noise"]["all"] is not None]
    return noise_scale(*zip(*pairs)) if pairs else None


def add_noise_scales(lines: Sequence[dict]) -> None:
    """Add `noise_scale`, `noise_scale_low` and `noise_scale_high` of the newest WINDOW measured steps to each measured
    step's diagnostics."""
    measured = [line for line in lines if "diagnostics" in line]
    for i, line in enumerate(measured, 1):
        if scale := noise_scale_of(measured[max(i - WINDOW, 0) : i]):
            line["diagnostics"] |= {f"noise_scale{end}": value for end, value in zip(("", "_low", "_high"), scale)}
