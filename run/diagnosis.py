"""What measured steps say, as lines of metrics.jsonl: the gradient noise scale over a window, with its interval."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

WINDOW = 64  # measured steps that a noise scale is of, at most
BLOCKS = 8  # of the jackknife: at least so many measured steps


class NoiseScale(NamedTuple):
    """The gradient noise scale, in tokens, with an interval of about 95%."""

    value: float
    low: float
    high: float
    """Infinite where the true gradient cannot be told from nothing: the noise scale is at least `low`."""


def noise_scale(signals: Sequence[float], noises: Sequence[float]) -> NoiseScale | None:
    """From |G|^2 and tr Sigma of several steps, in order: the ratio of their means, since a mean of ratios is biased.
    The interval is of a jackknife over blocks of neighbouring steps, which are alike. None of fewer than 8 steps."""
    if len(signals) < BLOCKS:
        return None
    blocks = [np.mean(block, axis=0) for block in np.array_split(np.stack([signals, noises], 1), BLOCKS)]
    weights = np.array([len(block) for block in np.array_split(np.arange(len(signals)), BLOCKS)], float)
    means = np.average(blocks, axis=0, weights=weights)
    left_out = np.array(
        [np.average(np.delete(blocks, i, 0), axis=0, weights=np.delete(weights, i)) for i in range(BLOCKS)]
    )
    error = lambda of: float(np.sqrt((BLOCKS - 1) / BLOCKS * np.sum((of - of.mean(0)) ** 2)))
    signal, noise = means
    if signal - 2 * error(left_out[:, 0]) <= 0:
        at_most = signal + 2 * error(left_out[:, 0])
        low = max(noise - 2 * error(left_out[:, 1]), 0.0) / at_most if at_most > 0 else 0.0
        return NoiseScale(float(noise / signal) if signal > 0 else math.inf, float(low), math.inf)
    value, spread = noise / signal, error(left_out[:, 1] / left_out[:, 0])
    return NoiseScale(float(value), float(max(value - 2 * spread, 0.0)), float(value + 2 * spread))


class Diagnosis:
    """The newest measured steps."""

    def __init__(self, lines: Iterable[dict]):
        """`lines`: those of metrics.jsonl, up to the step that the run goes on from."""
        self.newest: deque[dict[str, dict[str, float]]] = deque(maxlen=WINDOW)
        for line in lines:
            if "diagnostics" in line:
                self.newest.append({name: line["diagnostics"][name] for name in ("signal", "noise")})

    def line(self, measured: dict) -> dict:
        """Of the newest measured step (training/diagnostics.py, as numbers), what metrics.jsonl is to hold: norms by
        group and by block, and the noise scale of the window, of each group and of all."""
        self.newest.append({name: measured[name] for name in ("signal", "noise")})
        scales = {name: self.scale(name) for name in measured["signal"]}
        of_all = scales.pop("all")
        groups, blocks = (_by_name(measured[kind]) for kind in ("groups", "blocks"))
        for name, scale in scales.items():
            groups[name]["noise_scale"] = scale.value if scale else None
        return {
            "noise_scale": of_all.value if of_all else None,
            "noise_scale_low": of_all.low if of_all else None,
            "noise_scale_high": of_all.high if of_all else None,
            "coherence_running": measured["coherence_running"],
            "clipped": measured["clipped"],
            "groups": groups,
            "blocks": blocks,
            "signal": measured["signal"],
            "noise": measured["noise"],
        }

    def scale(self, name: str) -> NoiseScale | None:
        """Of a group, or of `all`, over the window."""
        pairs = [(step["signal"][name], step["noise"][name]) for step in self.newest if name in step["signal"]]
        sound = [(s, n) for s, n in pairs if s is not None and n is not None and math.isfinite(s) and math.isfinite(n)]
        return noise_scale(*zip(*sound)) if sound else None


def _by_name(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """{name: {quantity: value}} from {quantity: {name: value}}."""
    names = sorted({name for of in values.values() for name in of})
    return {name: {quantity: of[name] for quantity, of in values.items() if name in of} for name in names}
