"""What measured steps say, as lines of metrics.jsonl: the gradient noise scale over a window, with its interval."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from configs.schema import GroupConfig, OptimizerConfig
from training.optimizer import group_config

WINDOW = 64  # measured steps that a noise scale is of, at most
BLOCKS = 8  # of the jackknife: at least so many measured steps
T = float(stdtrit(BLOCKS - 1, 0.975))  # Student's


class NoiseScale(NamedTuple):
    """The gradient noise scale, in tokens, with an interval of about 95%."""

    value: float
    low: float
    high: float
    """Infinite where the true gradient cannot be told from nothing: the noise scale is at least `low`."""


def noise_scale(signals: Sequence[float], noises: Sequence[float]) -> NoiseScale | None:
    """From |G|^2 and tr Sigma of several steps, in order: the ratio of their means, since a mean of ratios is biased.
    The interval is of a jackknife over blocks of neighbouring steps, which are alike: 95%, by Student's t. None of
    fewer than 8 steps."""
    if len(signals) < BLOCKS:
        return None
    blocks = [np.mean(block, axis=0) for block in np.array_split(np.stack([signals, noises], 1), BLOCKS)]
    weights = np.array([len(block) for block in np.array_split(np.arange(len(signals)), BLOCKS)], float)
    means = np.average(blocks, axis=0, weights=weights)
    left_out = np.array(
        [np.average(np.delete(blocks, i, 0), axis=0, weights=np.delete(weights, i)) for i in range(BLOCKS)]
    )
    reach = lambda of: T * float(np.sqrt((BLOCKS - 1) / BLOCKS * np.sum((of - of.mean(0)) ** 2)))
    signal, noise = means
    if signal - reach(left_out[:, 0]) <= 0:
        at_most = signal + reach(left_out[:, 0])
        low = max(noise - reach(left_out[:, 1]), 0.0) / at_most if at_most > 0 else 0.0
        return NoiseScale(float(noise / signal) if signal > 0 else math.inf, float(low), math.inf)
    value, spread = noise / signal, reach(left_out[:, 1] / left_out[:, 0])
    return NoiseScale(float(value), float(max(value - spread, 0.0)), float(value + spread))


METRICS = {"noise_scale": "", "noise_scale_moments": "moments_"}
"""What precedes the names `signal` and `noise` (|G|^2 and tr Sigma) of the estimates that a noise scale is made of."""


def from_moments(
    moments: dict[str, dict[str, float]], optimizer: OptimizerConfig, step: int, tokens: int
) -> dict[str, dict[str, float]]:
    """|G|^2 and tr Sigma of each group that AdamW updates, and of `all` these, from its moments after `step` steps of
    so many tokens: for steps that are one gradient, whose noise is seen in how they differ from one another alone.

    A second moment is on average |G|^2 + tr Sigma / tokens, once its bias is taken away. A first moment is a mean over
    the steps before, in which less of the noise is left. Both take steps to be of one size, unchanged by the clip, and
    G to stay as it is for as long as a moment remembers: since it does not, this is a rough estimate."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for group, first in moments["first"].items():
        options = group_config(optimizer, group)
        assert isinstance(options, GroupConfig)
        beta = options.beta1
        of_signal = (1 - beta**step) ** 2
        of_noise = (1 - beta) / (1 + beta) * (1 - beta ** (2 * step))
        second = moments["second"][group] / (1 - options.beta2**step)
        of_one_step = (of_signal * second - first) / (of_signal - of_noise) if step > 1 else math.nan
        signal[group], noise[group] = second - of_one_step, tokens * of_one_step
    every = ({**of, "all": sum(of.values())} for of in (signal, noise))
    return dict(zip(("moments_signal", "moments_noise"), every))


class Diagnosis:
    """The newest measured steps."""

    def __init__(self, lines: Iterable[dict], optimizer: OptimizerConfig):
        """`lines`: those of metrics.jsonl, up to the step that the run goes on from."""
        self.optimizer = optimizer
        self.newest: deque[dict[str, dict[str, float]]] = deque(maxlen=WINDOW)
        for line in lines:
            if "diagnostics" in line:
                self._add(line["diagnostics"])

    def _add(self, measured: dict) -> None:
        estimates = [f"{metric}{of}" for metric in METRICS.values() for of in ("signal", "noise")]
        self.newest.append({name: measured[name] for name in estimates if name in measured})

    def line(self, measured: dict, step: int, tokens: int) -> dict:
        """Of the newest measured `step` of so many valid tokens (training/diagnostics.py, as numbers), what
        metrics.jsonl is to hold: norms by group and by block, and the noise scale of the window, of each group and of
        all, in each metric; from AdamW's moments where the step is one gradient."""
        measured = dict(measured)
        moments = measured.pop("moments")
        if tokens and moments["first"] and not math.isfinite(measured["signal"]["all"]):
            measured |= from_moments(moments, self.optimizer, step, tokens)
        self._add(measured)
        groups, blocks = (_by_name(measured[kind]) for kind in ("groups", "blocks"))
        line = {}
        for key, metric in METRICS.items():
            scales = {name: self.scale(name, metric) for name in measured.get(f"{metric}signal", ())}
            if "all" in scales:
                of_all = scales.pop("all") or (None, None, None)
                line |= dict(zip((key, f"{key}_low", f"{key}_high"), of_all))
            for name, scale in scales.items():
                groups[name][key] = scale.value if scale else None
        same = {name: value for name, value in measured.items() if name not in ("groups", "blocks")}
        return {**line, "groups": groups, "blocks": blocks, **same}

    def scale(self, name: str, metric: str = "") -> NoiseScale | None:
        """Of a group, or of `all`, over the window; `metric`: one of METRICS."""
        pairs = [[step.get(f"{metric}{of}", {}).get(name) for of in ("signal", "noise")] for step in self.newest]
        sound = [(s, n) for s, n in pairs if s is not None and n is not None and math.isfinite(s) and math.isfinite(n)]
        return noise_scale(*zip(*sound)) if sound else None


def _by_name(values: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """{name: {quantity: value}} from {quantity: {name: value}}."""
    names = sorted({name for of in values.values() for name in of})
    return {name: {quantity: of[name] for quantity, of in values.items() if name in of} for name in names}
