"""The source of each row of a run: shares of the rows, in stages that begin at numbers of tokens.

Row n of the run is a function of n alone. There is no counter, so any row is found at once, and the rows per step do
not matter.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from configs.schema import UserError


class Stage(NamedTuple):
    """Shares that apply from a number of tokens on."""

    starts: int
    """Tokens of the run before the stage."""
    shares: tuple[Fraction, ...]
    """The share of each source, 0 if unused. They sum to 1."""


class Mixture:
    """The sequence of sources that rows of `length` tokens come from.

    A stage begins with the first row that has its tokens before it. Within a stage the sources are interleaved as in
    `grain.MapDataset.mix`, with exact shares: any stretch of rows has them as nearly as complete rows allow. A source
    continues in a later stage from its place in the one before.
    """

    def __init__(self, stages: Sequence[Stage], length: int):
        self.stages = stages
        self.starts = [-(-stage.starts // length) for stage in stages]
        self.proportions = []  # of each stage, integers in exactly the ratio of the shares
        for _, shares in stages:
            scale = lcm(*(share.denominator for share in shares))
            self.proportions.append([int(share * scale) for share in shares])
        self.before = [(0,) * len(stages[0].shares)]  # rows of each source before each stage
        for starts, ends, proportions in zip(self.starts, self.starts[1:], self.proportions):
            counts = _counts(ends - starts, proportions)
            self.before.append(tuple(before + count for before, count in zip(self.before[-1], counts)))

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Return the source of a row, and the number of earlier rows of this source."""
        counts, after = self.counts(row), self.counts(row + 1)
        source = next(i for i, (before, now) in enumerate(zip(counts, after)) if now > before)
        return source, counts[source]

    def counts(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each source in the first `rows` rows."""
        stage = bisect_right(self.starts, max(rows - 1, 0)) - 1
        counts = _counts(rows - self.starts[stage], self.proportions[stage])
        return tuple(before + count for before, count in zip(self.before[stage], counts))

    def row_after(self, source: int, count: int, rows: int) -> int:
        """Return the smallest n, of at most `rows`, for which the run's first n rows contain `count` rows of a
        source."""
        return bisect_left(range(rows), count, key=lambda n: self.counts(n)[source])


def _counts(rows: int, proportions: Sequence[int]) -> tuple[int, ...]:
    """Return the number of rows of each source in a stage's first `rows` rows: its part of the rows that earlier
    sources leave."""
    counts, left = [], sum(proportions)
    for proportion in proportions:
        rest = rows * (left - proportion) // left if left else 0
        counts.append(rows - rest)
        rows, left = rest, left - proportion
    return tuple(counts)


def split_source(source: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the stages of `--data.source` as texts: the start of each, and its sources with their shares.

    `/web` is [("", [("", "/web")])]; `0.7:/web,0.3:/code;from=8e9,/good` is
    [("", [("0.7", "/web"), ("0.3", "/code")]), ("8e9", [("", "/good")])].
    """
    stages = []
    for number, written in enumerate(source.split(";from=")):
        starts, _, rest = written.partition(",") if number else ("", "", written)
        matched = [re.fullmatch(r"(-?\d*\.?\d+):(.+)", part) for part in rest.split(",")]
        parts = [(match[1], match[2]) for match in matched if match]
        if 0 < len(parts) < len(matched):
            raise UserError(f"--data.source={source}: each dataset of a mixture needs its share: 0.7:DIR,0.3:DIR")
        stages.append((starts, parts or [("", rest)]))
    return stages


def join_source(stages: list[tuple[str, list[tuple[str, str]]]]) -> str:
    """Return the text that `split_source` splits."""
    shares = lambda parts: ",".join(f"{share}:{name}" if share else name for share, name in parts)
    return ";".join(f"from={starts}," * bool(starts) + shares(parts) for starts, parts in stages)


def read_source(source: str) -> tuple[list[str], list[Stage]]:
    """Return the sources and stages of `--data.source`. Raise UserError for a share of 0, and for stages out of
    order."""

    def require(condition: bool, expectation: str) -> None:
        if not condition:
            raise UserError(f"--data.source={source}: {expectation}")

    starts, mixtures = [], []
    for written, parts in split_source(source):
        is_count = starts and re.fullmatch(r"\d[\d_]*(\.\d+)?(e\d+)?", written)  # 8e9 or 8_000_000_000
        starts.append(int(min(float(written), 2**63)) if is_count else 0)
        later = "a later stage is `;from=TOKENS,0.7:DIR,0.3:DIR`, in quotes: --data.source='/web;from=8e9,/good'"
        require(starts == [0] or (0 < starts[-1] < 2**63 and parts[0][1] != ""), later)
        require(starts == sorted(set(starts)), f"the stage from={written} must begin after the one before it")
        shares = {name: Fraction(share or 1) for share, name in parts}
        total = sum(shares.values())
        require(min(shares.values()) > 0, "each dataset of a mixture needs its share, above 0: 0.7:DIR,0.3:DIR")
        require(total < 10**9, "the shares of a stage must sum to less than a billion")
        require(len(shares) == len(parts), "a dataset is named twice in one stage: give it the sum of its shares")
        mixtures.append({name: share / total for name, share in shares.items()})
    names = list(dict.fromkeys(name for mixture in mixtures for name in mixture))
    shares_of = lambda mixture: tuple(mixture.get(name, Fraction(0)) for name in names)
    return names, [Stage(first, shares_of(mixture)) for first, mixture in zip(starts, mixtures)]


def mean_shares(stages: Sequence[Stage]) -> list[float]:
    """Return each source's mean share over the stages, whatever their lengths: the same for runs of any length."""
    return [float(sum(shares) / len(stages)) for shares in zip(*(stage.shares for stage in stages))]
