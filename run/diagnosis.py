"""Measured steps, as lines of metrics.jsonl: the gradient noise scale over a window, with its interval."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

WINDOW = 64  # most measured steps in a noise scale
BLOCKS = 8  # of the jackknife: at least this many measured steps
T = 2.364624251592784  # Student's, of BLOCKS - 1 degrees of freedom at 0.975. Importing SciPy takes a tenth of a start.


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


class Diagnosis:
    """The window of newest measured steps."""

    def __init__(self, lines: Iterable[dict] = ()):
        """Take `lines`: those of metrics.jsonl, up to the step that the run resumes from."""
        self.newest: deque[dict[str, dict[str, float]]] = deque(maxlen=WINDOW)
        for line in lines:
            if "diagnostics" in line:
                self.newest.append(line["diagnostics"])

    def line(self, measured: dict) -> dict:
        """Return the record for metrics.jsonl of the newest measured step (training/diagnostics.py, as numbers): norms
        by group and by block, and the window's noise scale, of each group and of all."""
        measured = dict(measured)
        groups, blocks = (_by_name(measured.pop(kind)) for kind in ("groups", "blocks"))
        self.newest.append(measured)
        for name, group in groups.items():
            group["noise_scale"] = scale.value if (scale := self.scale(name)) else None
        of_all = self.scale("all") or (None, None, None)
        noise = dict(zip(("noise_scale", "noise_scale_low", "noise_scale_high"), of_all))
        return {**noise, "groups": groups, "blocks": blocks, **measured}

    def scale(self, name: str) -> NoiseScale | None:
        """Return the noise scale of a group, or of `all`, over the window."""
        pairs = [(step["signal"].get(name), step["noise"].get(name)) for step in self.newest]
        known = [(s, n) for s, n in pairs if s is not None and n is not None and math.isfinite(s) and math.isfinite(n)]
        return noise_scale(*zip(*known)) if known else None


def _by_name(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return {name: {quantity: value}} of {quantity: {name: value}}."""
    names = sorted({name for by_name in values.values() for name in by_name})
    return {name: {key: by_name[name] for key, by_name in values.items() if name in by_name} for name in names}
