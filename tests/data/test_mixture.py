import re
from fractions import Fraction

import grain
import numpy as np
import pytest

from configs.schema import UserError
from data.dataset import join_source, read_source, split_source
from data.loader import Mixture, RowSequence, StepBatches
from data.packing import StreamRows
from data.shards import TokenStream

LENGTH = 4
ROWS = [
    StreamRows(TokenStream([np.arange(size * LENGTH + 1) + 10_000 * i]), LENGTH) for i, size in enumerate((83, 60, 47))
]


@pytest.mark.parametrize(
    ("source", "names", "shares"),
    [
        ("hf:a/b", ["hf:a/b"], [1]),
        ("0.7:/a,0.3:/b c", ["/a", "/b c"], [0.7, 0.3]),
        ("1:d,3:gs://b/c", ["d", "gs://b/c"], [0.25, 0.75]),
    ],
)
def test_sources_and_shares(source, names, shares):
    assert read_source(source) == (names, [Fraction(str(share)) for share in shares])
    assert join_source(split_source(source)) == source


@pytest.mark.parametrize("source", ["0.5:a,b", "0:a,1:b", "-1:a", "1:a,", f"{'9' * 400}:a,1:b", "1:a,1:a"])
def test_an_invalid_source_is_refused_by_name(source):
    with pytest.raises(UserError, match=re.escape(f"--data.source={source}: ")):
        read_source(source)


@pytest.mark.parametrize("shares", [("1",), ("0.5", "0.001", "0.499"), ("5/7", "1/7", "1/7")])
def test_rows_are_those_that_grain_mixes_and_shares_are_exact(shares):
    parts = [grain.MapDataset.range(10**7).map(lambda n, i=i: (i, n)) for i in range(len(shares))]
    mixed = grain.MapDataset.mix(parts, [float(Fraction(share)) for share in shares])
    mixture = Mixture(list(map(Fraction, shares)))
    rows = [mixture[n] for n in range(2000)]
    assert rows == [mixed[n] for n in range(2000)]
    assert all(mixture[n] == mixed[n] for n in (999_999, 1_000_000))
    assert mixture.counts(7 * 10**9) == tuple(7 * 10**9 * Fraction(share) for share in shares)
    assert mixture.counts(1234) == tuple(sum(part == i for part, _ in rows[:1234]) for i in range(len(shares)))


def test_rows_are_one_sequence_s_for_any_size_of_a_step():
    """Take steps of 10 rows, then of 30 from row 90 on."""
    mixture = Mixture([Fraction(share) for share in ("0.6", "0.1", "0.3")])
    expected = [RowSequence(ROWS, mixture, seed=3)[n] for n in range(400)]
    batches = lambda width, first: StepBatches(ROWS, mixture, 3, (1, width, LENGTH), np.arange(width), first_row=first)
    small, large = batches(10, 0), batches(30, 90)
    numbers = [*map(small.row_numbers, range(9)), *map(large.row_numbers, range(10))]
    assert [row for rows in numbers for row in rows] == expected[:390]
    assert np.array_equal(batches(10, 120)[0]["inputs"], large[1]["inputs"][:, :10])
    last = [row for part, row in expected if part == 2]  # epochs of a source follow each other
    assert sorted(last[:47]) == sorted(last[47:94]) == list(range(47)) and last[:47] != last[47:94]
