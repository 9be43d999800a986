"""Standard errors and intervals of what an evaluation measures."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

LEVEL = 0.95
"""Probability that an interval covers the true value."""


def ratio(
    bits: Sequence[float], sizes: Sequence[float | int], sources: Sequence[int] | None = None
) -> tuple[float, float | None]:
    """Return total bits over total bytes, and the standard error of this ratio over its parts (Cochran, Sampling
    Techniques, 1977, 6.3). Between parts of different `sources` nothing counts as an error: each source has its share
    (separate ratios, 6.10). The error is None if a source has a single part."""
    numerators, denominators = np.array(bits, np.float64), np.array(sizes, np.float64)
    of_parts, total = np.array(sources or np.zeros(len(bits))), denominators.sum()
    squares: list[float] = []
    for source in np.unique(of_parts):
        own, its = numerators[of_parts == source], denominators[of_parts == source]
        if len(own) < 2:
            return float(numerators.sum() / total), None
        residuals = own - own.sum() / its.sum() * its
        squares.append(len(own) / (len(own) - 1) * np.sum(residuals**2))
    return float(numerators.sum() / total), math.sqrt(math.fsum(squares)) / float(total)


def student_interval(value: float, error: float, count: int) -> list[float]:
    """Return the interval of a mean of `count` observations with this standard error, by Student's t."""
    from scipy.stats import t  # half a second to import

    reach = float(t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return [value - reach, value + reach]


def share_interval(share: float | int, count: float | int) -> list[float]:
    """Return the interval of a share among `count` (E. B. Wilson, JASA 22, 1927). It has a width also where all or none
    are right. scipy has it for whole numbers alone (`binomtest`)."""
    from scipy.special import ndtri

    z = float(ndtri((1 + LEVEL) / 2))
    middle = share + z * z / (2 * count)
    reach = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return [(middle + sign * reach) / (1 + z * z / count) for sign in (-1, 1)]


def mean_share_interval(shares: Float[np.ndarray, "items"]) -> list[float]:
    """Return the interval of the mean of shares, one for each of independent items: Wilson's, for as many answers, each
    right or wrong, as give the mean the same variance."""
    mean = float(shares.mean())
    are_equal = shares.max() == shares.min()  # rounding may give them a variance above 0
    count = len(shares) if are_equal else len(shares) * mean * (1 - mean) / float(shares.var())
    return share_interval(mean, count)


def mean_interval(values: Sequence[float], intervals: Sequence[Sequence[float]]) -> list[float]:
    """Return the interval of the mean of independent values, each with its own interval (Zou and Donner, Statistics in
    Medicine 27, 2008)."""
    mean = math.fsum(values) / len(values)
    below = math.hypot(*(value - low for value, (low, _) in zip(values, intervals))) / len(values)
    above = math.hypot(*(high - value for value, (_, high) in zip(values, intervals))) / len(values)
    return [mean - below, mean + above]
