"""Measured steps, as lines of metrics.jsonl: the gradient noise scale over a window, with its interval."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from configs.schema import GroupConfig, OptimizerConfig
from training.optimizer import group_config

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
    reach = lambda values: T * float(np.sqrt((BLOCKS - 1) / BLOCKS * np.sum((values - values.mean(0)) ** 2)))
    signal, noise = np.mean(estimates, axis=0)
    if signal - reach(left_out[:, 0]) <= 0:
        at_most = signal + reach(left_out[:, 0])
        low = max(noise - reach(left_out[:, 1]), 0.0) / at_most if at_most > 0 else 0.0
        return NoiseScale(float(noise / signal) if signal > 0 else math.inf, float(low), math.inf)
    value, spread = noise / signal, reach(left_out[:, 1] / left_out[:, 0])
    return NoiseScale(float(value), float(max(value - spread, 0.0)), float(value + spread))


ESTIMATES = {"noise_scale": ("signal", "noise"), "noise_scale_moments": ("moments_signal", "moments_noise")}
"""Names of |G|^2 and tr Sigma, whose ratio is each noise scale."""


def from_moments(
    moments: dict[str, dict[str, float]], optimizer: OptimizerConfig, tokens: int
) -> dict[str, dict[str, float]]:
    """Return |G|^2 and tr Sigma of each group that AdamW updates, and of `all`, from its moments after a step of
    `tokens` tokens; nan before a second update. It serves steps of one micro-batch, whose noise shows between steps.

    A second moment is on average |G|^2 + tr Sigma / tokens, once its bias is corrected. A first moment is a mean over
    earlier steps, and has less noise. Both assume steps of one size, no clipping, and a constant G over a moment's
    memory. G changes, so this is a rough estimate."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for group, first in moments["first"].items():
        options = group_config(optimizer, group)
        assert isinstance(options, GroupConfig)
        beta, weight = options.beta1, moments["first_weight"][group]  # 1 - beta^updates
        known = weight > 1.001 * (1 - beta)
        share_of_noise = (1 - beta) / (1 + beta) * (1 - (1 - weight) ** 2)
        second = moments["second"][group] / moments["second_weight"][group] if known else math.nan
        variance = (weight**2 * second - first) / (weight**2 - share_of_noise) if known else math.nan
        signal[group], noise[group] = second - variance, tokens * variance
    with_sum = lambda groups: {**groups, "all": sum(groups.values())}
    return {"moments_signal": with_sum(signal), "moments_noise": with_sum(noise)}


class Diagnosis:
    """The window of newest measured steps."""

    def __init__(self, lines: Iterable[dict], optimizer: OptimizerConfig):
        """Take `lines`: those of metrics.jsonl, up to the step that the run resumes from."""
        self.optimizer = optimizer
        self.newest: deque[dict[str, dict[str, float]]] = deque(maxlen=WINDOW)
        for line in lines:
            if "diagnostics" in line:
                self._add(line["diagnostics"])

    def _add(self, measured: dict) -> None:
        names = [name for pair in ESTIMATES.values() for name in pair]
        self.newest.append({name: measured[name] for name in names if name in measured})

    def line(self, measured: dict, tokens: int) -> dict:
        """Return the record for metrics.jsonl of the newest measured step of `tokens` valid tokens
        (training/diagnostics.py, as numbers): norms by group and by block, and the window's noise scale, of each group
        and of all. If the step is one micro-batch, the noise scale is from AdamW's moments."""
        measured = dict(measured)
        moments = measured.pop("moments")
        if tokens and moments["first"] and not math.isfinite(measured["signal"]["all"]):
            measured |= from_moments(moments, self.optimizer, tokens)
        self._add(measured)
        groups, blocks = (_by_name(measured.pop(kind)) for kind in ("groups", "blocks"))
        line = {}
        for key, (signal, _) in ESTIMATES.items():
            for name in measured.get(signal, ()):
                scale = self.scale(name, key)
                if name == "all":
                    line |= dict(zip((key, f"{key}_low", f"{key}_high"), scale or (None, None, None)))
                else:
                    groups[name][key] = scale.value if scale else None
        return {**line, "groups": groups, "blocks": blocks, **measured}

    def scale(self, name: str, key: str) -> NoiseScale | None:
        """Return the noise scale of a group, or of `all`, over the window; `key`: one of ESTIMATES."""
        pairs = [[step.get(estimate, {}).get(name) for estimate in ESTIMATES[key]] for step in self.newest]
        known = [(s, n) for s, n in pairs if s is not None and n is not None and math.isfinite(s) and math.isfinite(n)]
        return noise_scale(*zip(*known)) if known else None


def _by_name(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return {name: {quantity: value}} of {quantity: {name: value}}."""
    names = sorted({name for by_name in values.values() for name in by_name})
    return {name: {key: by_name[name] for key, by_name in values.items() if name in by_name} for name in names}
