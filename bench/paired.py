"""Intervals and p-values of paired differences, one for each seed, that allow a look after every seed.

Whoever looks after each seed, and stops at a clear difference, errs more often than Student's t says: with 8 seeds
18% of equal pairs seem to differ, not 5%. So every look tests zero at one stricter level, chosen such that 5% of equal
pairs are found to differ at any of them (Pocock, Biometrika 64, 1977, 191-199; for unknown variances by significance
levels: Jennison and Turnbull, Group Sequential Methods, 1999, 4.4). Simulated pairs with a fixed seed give the level.

That level would make intervals far from zero too wide. They are the differences that a t test does not reject: at the
strict level near zero, at `FAR` elsewhere. tests/bench/test_paired.py measures their coverage.
"""

from functools import cache

import numpy as np
from jaxtyping import Float
from scipy.special import stdtr, stdtrit  # JAX depends on SciPy

Values = Float[np.ndarray, "... seeds"]
Each = Float[np.ndarray, "..."]

LEVEL = 0.05
FAR = 0.033  # with it and NEAR, 93% to 97% of intervals cover any difference, for 2 to 12 seeds
NEAR = 0.3  # of the difference that is just found to differ from zero
DRAWS = 99_999


def means(values: Values) -> tuple[Values, Values]:
    """Return the mean of the first 2, 3, ... values and its standard error."""
    counts = np.arange(2, values.shape[-1] + 1)
    mean = values.cumsum(-1)[..., 1:] / counts
    # Steps of Welford's sum of squares: values that are nearly the same lose no digits.
    before = values.cumsum(-1)[..., :-1] / (counts - 1)
    squares = ((values[..., 1:] - before) ** 2 * (counts - 1) / counts).cumsum(-1)
    return mean, np.sqrt(squares / (counts - 1) / counts)


def levels(values: Values) -> Values:
    """Return the two-sided p-value of each t test of zero on the first 2, 3, ... values."""
    mean, error = means(values)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal values
        statistic = np.nan_to_num(-np.abs(mean) / error, nan=0.0)
    return 2 * stdtr(np.arange(1, values.shape[-1]), statistic)


@cache
def of_equal_pairs(seeds: int) -> Float[np.ndarray, "draws"]:
    """Return the lowest levels of simulated equal pairs with a look after each of 2, ..., `seeds` seeds, sorted."""
    return np.sort(levels(np.random.default_rng(0).standard_normal((DRAWS, seeds))).min(-1))


def p_value(values: Values, seeds: int) -> Each:
    """Return the p-value of no difference at the last look at values, of at most `seeds`: the share of equal pairs that
    would seem as different at some look. It is 1 for a single value."""
    if values.shape[-1] < 2:
        return np.ones(values.shape[:-1])
    return (1 + np.searchsorted(of_equal_pairs(seeds), levels(values)[..., -1], side="right")) / (DRAWS + 1)


def interval(values: Values, seeds: int) -> tuple[Each, Each]:
    """Return the ends of the 95% interval of the difference, if a look after each of at most `seeds` seeds may end the
    comparison. It excludes zero if and only if `p_value` is at most 5%. A single value has no bounds."""
    if values.shape[-1] < 2:
        return np.full(values.shape[:-1], -np.inf), np.full(values.shape[:-1], np.inf)
    level = of_equal_pairs(seeds)[int(LEVEL * (DRAWS + 1)) - 1]
    mean, error = (of[..., -1] for of in means(values))
    strict, other = (-stdtrit(values.shape[-1] - 1, at / 2) * error for at in (level, max(level, FAR)))
    return _low(mean, strict, other), -_low(-mean, strict, other)


def _low(mean: Each, strict: Each, other: Each) -> Each:
    near = NEAR * strict
    by_zero = np.minimum(mean - other, np.maximum(mean - strict, -near))
    return np.where(mean - strict < near, by_zero, mean - other)


def holm(p_values: Float[np.ndarray, "... comparisons"]) -> Float[np.ndarray, "... comparisons"]:
    """Return the p-values corrected for their number (Holm, Scandinavian Journal of Statistics 6, 1979, 65-70): the
    chance of any false difference among those at most 5% is at most 5%."""
    order = p_values.argsort(-1)
    times = np.arange(p_values.shape[-1], 0, -1)
    raised = np.maximum.accumulate(np.take_along_axis(p_values, order, -1) * times, -1).clip(max=1.0)
    return np.take_along_axis(raised, order.argsort(-1), -1)
