"""The order of a run's rows: the dataset that gives row n of the run, and which of its rows that is.

Both are functions of n, so any row is found at once. A mixture interleaves its datasets by their shares. Each epoch of
a dataset is a permutation of all its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import lcm

import numpy as np
from grain.experimental import index_shuffle

from data.packing import Rows

ROW_ORDER = 1
"""Number of this order. A run continues only in the order in which it began."""


@dataclass(frozen=True)
class Mixture:
    """The datasets that rows come from, interleaved as in `grain.MapDataset.mix`, but with exact shares: any stretch of
    rows has them as nearly as complete rows allow."""

    shares: Mapping[str, Fraction]
    """Share of each dataset, by its fingerprint. They sum to 1."""

    @cached_property
    def proportions(self) -> list[int]:
        """Return the shares as integers."""
        scale = lcm(*(share.denominator for share in self.shares.values()))
        return [int(share * scale) for share in self.shares.values()]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Return the dataset of a row, as its place in `shares`, and the number of earlier rows of this dataset."""
        counts, after = self.counts(row), self.counts(row + 1)
        part = next(i for i, (before, now) in enumerate(zip(counts, after)) if now > before)
        return part, counts[part]

    def counts(self, rows: int) -> tuple[int, ...]:
        """Return the number of rows of each dataset in the first `rows` rows: its part of those that earlier datasets
        leave."""
        counts, left = [], sum(self.proportions)
        for proportion in self.proportions:
            rest = rows * (left - proportion) // left
            counts.append(rows - rest)
            rows, left = rest, left - proportion
        return tuple(counts)


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
