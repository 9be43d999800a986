"""Test the order of a run's rows: orders of epochs, shares of a mixture, and what a change of shares keeps."""

import json
from collections import defaultdict
from fractions import Fraction

import grain
import numpy as np
import pytest

from data.loader import StepBatches
from data.order import Mixture, RowSequence
from data.packing import StreamRows
from data.shards import TokenStream

LENGTH = 4
SIZES = {"a": 83, "b": 60, "c": 47, "d": 31}
"""Rows of each dataset."""
ROWS = {name: StreamRows(TokenStream([np.arange(size * LENGTH + 1)]), LENGTH) for name, size in SIZES.items()}
CHANGES = [
    (0, {"a": "9/10", "b": "1/10"}),
    (120, {"a": "1/2", "b": "1/2"}),
    (180, {"a": "1/4", "b": "1/4", "c": "1/2"}),  # one is added
    (270, {"c": "2/3", "a": "1/3"}),  # one has left
    (330, {"b": "1/5", "d": "4/5"}),  # and is back
]
"""The run's rows from which on its mixture has these shares."""
END = 600


def mixture_of(shares: dict[str, str], length: int = LENGTH) -> Mixture:
    return Mixture({name: Fraction(share) for name, share in shares.items()}, length)


def mixtures() -> list[Mixture]:
    """Return the mixture after each of `CHANGES`, from the record of the one before, as JSON."""
    made = [mixture_of(CHANGES[0][1])]
    for row, shares in CHANGES[1:]:
        made.append(mixture_of(shares).continued(json.loads(json.dumps(made[-1].record())), row * LENGTH))
    return made


def rows_of(mixture: Mixture) -> RowSequence:
    return RowSequence([ROWS[name] for name in mixture.shares], mixture, 0)


def test_orders_of_other_seeds_datasets_and_epochs_are_unrelated():
    """Take the first rows of a hundred orders: seeds by datasets by epochs. Two unrelated ones agree in a row of a
    thousand, so hardly ever in three of 32."""
    size, begin = 1000, np.arange(32)
    rows = [StreamRows(TokenStream([np.arange(size * LENGTH + 1)]), LENGTH)]
    orders = {}
    for seed in (0, 1, 2, 2**32 - 1, 2**32):
        for name in ("0", "1", "abcdef0123456789", "f" * 16):
            sequence = RowSequence(rows, mixture_of({name: "1"}), seed)
            for epoch in range(5):
                orders[seed, name, epoch] = [sequence[epoch * size + place] for place in begin.tolist()]
    firsts = np.array(list(orders.values()))[..., 1]
    agreeing = (firsts[:, None] == firsts).sum(axis=-1)
    assert len(firsts) == 100 and agreeing[~np.eye(100, dtype=bool)].max() < 3
    again = RowSequence(rows, mixture_of({"1": "1"}), 2)
    assert [again[3 * size + place] for place in begin.tolist()] == orders[2, "1", 3]


@pytest.mark.parametrize("shares", [("1",), ("0.5", "0.001", "0.499"), ("5/7", "1/7", "1/7")])
def test_rows_are_those_that_grain_mixes_and_shares_are_exact(shares):
    parts = [grain.MapDataset.range(10**7).map(lambda n, i=i: (i, n)) for i in range(len(shares))]
    mixed = grain.MapDataset.mix(parts, [float(Fraction(share)) for share in shares])
    mixture = mixture_of(dict(zip("abc", shares)))
    rows = [mixture[n] for n in range(2000)]
    assert rows == [mixed[n] for n in range(2000)]
    assert all(mixture[n] == mixed[n] for n in (999_999, 1_000_000))
    assert mixture.counts(7 * 10**9) == tuple(7 * 10**9 * Fraction(share) for share in shares)
    assert mixture.counts(1234) == tuple(sum(part == i for part, _ in rows[:1234]) for i in range(len(shares)))


def test_a_dataset_gives_all_its_rows_once_before_it_repeats_one_whatever_the_changes():
    given, ends = defaultdict(list), [row for row, _ in CHANGES[1:]] + [END]
    for mixture, (begin, shares), end in zip(mixtures(), CHANGES, ends):
        sequence, names = rows_of(mixture), list(mixture.shares)
        counts = dict.fromkeys(shares, 0)
        for position in range(begin, end):
            part, row = sequence[position]
            given[names[part]].append(row)
            counts[names[part]] += 1
        for name, share in shares.items():
            assert abs(counts[name] - (end - begin) * Fraction(share)) < len(shares), (begin, name)
    assert all(len(rows) > SIZES[name] for name, rows in given.items()) and given.keys() == SIZES.keys()
    for name, rows in given.items():
        alone = rows_of(mixture_of({name: "1"}))
        assert rows == [alone[position][1] for position in range(len(rows))], name
        assert sorted(rows[: SIZES[name]]) == list(range(SIZES[name])), name


def test_a_start_with_the_same_shares_continues_the_recorded_mixture_from_any_row():
    for mixture in mixtures():
        shares = {name: str(share) for name, share in mixture.shares.items()}
        for row in (mixture.first_row, mixture.first_row + 7, 10**9):
            assert mixture_of(shares).continued(mixture.record(), row * LENGTH) == mixture
    turned = mixture_of(dict(reversed(CHANGES[1][1].items())))  # interleaved the other way round
    assert turned.continued(mixtures()[1].record(), 150 * LENGTH) == Mixture(
        turned.shares, LENGTH, 150, {"a": 108 + 15, "b": 12 + 15}
    )


def test_a_change_at_an_earlier_row_forgets_what_came_after_it():
    """A run that goes back continues from its checkpoint's record."""
    first, second, *_ = mixtures()
    shares = CHANGES[2][1]
    assert mixture_of(shares).continued(first.record(), 50 * LENGTH).given == {"a": 45, "b": 5}
    changed = mixture_of(shares).continued(second.record(), CHANGES[1][0] * LENGTH)
    assert changed == mixture_of(shares).continued(first.record(), CHANGES[1][0] * LENGTH)


def test_with_another_length_of_rows_each_dataset_goes_on_at_its_token():
    first = mixture_of({"a": "2/3", "b": "1/3"})
    assert mixture_of({"a": "2/3", "b": "1/3"}, 8).continued(first.record(), 30 * LENGTH) == Mixture(
        first.shares, 8, 15, {"a": 10, "b": 5}
    )


def test_hosts_read_the_parts_of_one_batch_after_each_change():
    shape = (3, 8, LENGTH)
    for mixture, (row, _) in zip(mixtures(), CHANGES):
        rows = [ROWS[name] for name in mixture.shares]
        whole, *halves = (
            StepBatches(rows, mixture, 7, shape, local, first_row=row)[1]["inputs"]
            for local in (np.arange(8), np.arange(4), np.arange(4, 8))
        )
        assert np.array_equal(whole, np.concatenate(halves, axis=1))
