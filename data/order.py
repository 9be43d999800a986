"""The order of a run's rows: the dataset that gives row n of the run, and which of its rows that is.

Both are functions of n, so any row is found at once. A mixture interleaves its datasets by their shares. Each epoch of
a dataset is a permutation of all its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm
from typing import Any

import numpy as np
from grain.experimental import index_shuffle

from data.packing import Rows

ROW_ORDER = 2
"""Number of this order. A run continues only in the order in which it began."""


@dataclass(frozen=True)
class Mixture:
    """The datasets that rows come from, interleaved as in `grain.MapDataset.mix`, but with exact shares: any stretch of
    rows has them as nearly as complete rows allow.

    When a run goes on with other shares, each dataset goes on where it was. So a dataset gives all its rows once before
    it repeats one, whatever the shares.
    """

    shares: Mapping[str, Fraction]
    """Share of each dataset, by its fingerprint. They sum to 1."""
    length: int
    """Tokens of a row."""
    first_row: int = 0
    """The run's row at which these shares began."""
    given: Mapping[str, int] = field(default_factory=dict)
    """Rows that each dataset had given before that row, also those of datasets that have left."""

    @cached_property
    def proportions(self) -> list[int]:
        """Return the shares as integers."""
        scale = lcm(*(share.denominator for share in self.shares.values()))
        return [int(share * scale) for share in self.shares.values()]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Return the dataset of the run's row `row`, as its place in `shares`, and the number of this dataset's rows
        before it."""
        counts, after = self.counts(row), self.counts(row + 1)
        part = next(i for i, (before, now) in enumerate(zip(counts, after)) if now > before)
        return part, counts[part]

    def counts(self, row: int) -> tuple[int, ...]:
        """Return the number of rows that each dataset gives before the run's row `row`: of those with these shares its
        part of what earlier datasets leave."""
        counts, rows, left = [], row - self.first_row, sum(self.proportions)
        for name, proportion in zip(self.shares, self.proportions):
            rest = rows * (left - proportion) // left
            counts.append(self.given.get(name, 0) + rows - rest)
            rows, left = rest, left - proportion
        return tuple(counts)

    def record(self) -> dict[str, Any]:
        """Return what a run's record says of it, for `continued`."""
        shares = [[name, str(share)] for name, share in self.shares.items()]
        return {
            "shares": shares,
            "sequence_length": self.length,
            "first_row": self.first_row,
            "rows_before": dict(self.given),
        }

    def continues(self, record: dict[str, Any]) -> bool:
        """Return whether a recorded mixture has these shares and this length of rows."""
        shares = [[name, str(share)] for name, share in self.shares.items()]
        return record["shares"] == shares and record["sequence_length"] == self.length

    def continued(self, record: dict[str, Any], tokens: int) -> "Mixture":
        """Return the mixture of the rows after the run's first `tokens` tokens: the recorded one if its shares are the
        same, else these shares from there on, each dataset after the rows that it gave."""
        shares = {name: Fraction(share) for name, share in record["shares"]}
        before = Mixture(shares, record["sequence_length"], record["first_row"], record["rows_before"])
        if self.continues(record):
            return before
        rows = {**before.given, **dict(zip(shares, before.counts(tokens // before.length)))}
        given = {name: count * before.length // self.length for name, count in rows.items()}
        return Mixture(self.shares, self.length, tokens // self.length, given)


class RowSequence:
    """The endless sequence, by random access: position -> (dataset, row of it). Each row of a dataset occurs once in
    its epoch."""

    def __init__(self, rows: Sequence[Rows], mixture: Mixture, seed: int):
        self.mixture, self.seed = mixture, seed
        self.datasets = [(name, len(part)) for name, part in zip(mixture.shares, rows, strict=True)]

    def __getitem__(self, position: int) -> tuple[int, int]:
        part, number = self.mixture[position]
        name, size = self.datasets[part]
        epoch, place = divmod(number, size)
        return part, index_shuffle(place, max_index=size - 1, seed=order_seed(self.seed, name, epoch), rounds=4)


@lru_cache(4096)
def order_seed(seed: int, dataset: str, epoch: int) -> int:
    """Return the seed of a permutation, unrelated for each run's seed, dataset (its fingerprint) and epoch. Grain's own
    adds the epoch to the seed, so seed 0's second epoch would be seed 1's first."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, int(dataset, 16)))
    return int(sequence.generate_state(1)[0])
