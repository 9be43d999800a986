"""Compute means with intervals, and decisions from them: pure functions of numbers."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import stdtrit  # JAX depends on SciPy

T = TypeVar("T")
Branch = TypeVar("Branch", bound=tuple[float, str])


class Estimate(NamedTuple):
    """A mean, with an interval of 95% by Student's t."""

    value: float
    low: float
    high: float

    def shown(self, form: str) -> str:
        """Return the mean and its interval, each number in a format."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values. A single one has an unbounded interval. If one is not finite, the run
    failed and all are infinite."""
    array = np.asarray(values, float)
    if not np.isfinite(array).all():
        return Estimate(math.inf, math.inf, math.inf)
    if len(array) < 2:
        return Estimate(float(array.mean()), -math.inf, math.inf)
    error = float(stdtrit(len(array) - 1, 0.975)) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(float(array.mean()), float(array.mean()) - error, float(array.mean()) + error)


def difference(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Return the mean of a - b, paired: what both share, as a hard text, cancels."""
    return mean([x - y for x, y in zip(a, b, strict=True)])


def slowdowns(seconds: Mapping[T, Sequence[float]]) -> dict[T, Estimate]:
    """Return each one's excess time over the fastest, as a share: a geometric mean over rounds. A round
    measures all, so a slow minute of the machine cancels. Dropped ones are compared over the rounds that they have."""
    most = max(len(values) for values in seconds.values())
    total = {name: sum(map(math.log, values)) for name, values in seconds.items() if len(values) == most}
    best = min(total, key=lambda name: total[name])
    slower = {best: Estimate(0.0, 0.0, 0.0)}
    for name in seconds.keys() - {best}:
        logs = [math.log(value / of_best) for value, of_best in zip(seconds[name], seconds[best])]
        slower[name] = Estimate(*(math.expm1(min(log, 700.0)) for log in mean(logs)))
    return slower


def better_half(losses: Mapping[T, Sequence[float]]) -> list[T]:
    """Return the half with the lowest mean losses, rounded up, the lowest first (successive halving, arXiv:1502.07943).
    Those with a loss that is not finite are left out."""
    finite = [name for name in losses if all(map(math.isfinite, losses[name]))]
    ranked = sorted(finite, key=lambda name: float(np.mean(losses[name])))
    return ranked[: max(1, -(-len(losses) // 2))]


def behind_best(losses: Mapping[T, Sequence[float]]) -> tuple[T, dict[T, Estimate]]:
    """Return the one with the lowest mean loss, and each one's excess loss over it."""
    best = better_half(losses)[0]
    return best, {name: difference(losses[name], losses[best]) for name in losses}


def lowest_of_the_best(losses: Mapping[float, Sequence[float]]) -> tuple[float, dict[float, Estimate]]:
    """Return the smallest factor that is not certainly worse than the best, and each factor's excess loss over the
    best. A tie goes to the smaller rate, since the best rate falls as runs grow longer (arXiv:2409.19913)."""
    best, behind = behind_best(losses)
    return min([best, *(factor for factor, more in behind.items() if factor < best and more.low <= 0)]), behind


def critical_batch(losses: Mapping[Branch, Sequence[float]], tolerance: float) -> tuple[Branch, dict[Branch, Estimate]]:
    """Return the factor and rule of the largest batch that loses at most `tolerance` nats on the best (after
    arXiv:2505.23971), and each batch's excess loss over the best. If both rules qualify, the one that loses less
    counts."""
    _, behind = behind_best(losses)
    within = [branch for branch, more in behind.items() if more.value <= tolerance]
    return max(within, key=lambda branch: (branch[0], -behind[branch].value)), behind
