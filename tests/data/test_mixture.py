import re
from fractions import Fraction

import grain
import numpy as np
import pytest

from configs.schema import UserError
from data.loader import RowSequence, StepBatches
from data.mixture import Mixture, Stage, join_source, mean_shares, read_source, split_source
from data.packing import StreamRows
from data.shards import TokenStream

LENGTH = 4


def stage(starts: int, *shares: str) -> Stage:
    return Stage(starts, tuple(map(Fraction, shares)))


STAGES = [stage(0, "0.9", "0.1", "0"), stage(401, "0.3", "0", "0.7"), stage(1200, "0", "0.5", "0.5")]
BEGINS = [0, 101, 300]  # rows: the first row of each stage
ROWS = [
    StreamRows(TokenStream([np.arange(size * LENGTH + 1) + 10_000 * i]), LENGTH) for i, size in enumerate((83, 60, 47))
]


@pytest.mark.parametrize(
    ("source", "names", "stages"),
    [
        ("hf:a/b", ["hf:a/b"], [(0, (1.0,))]),
        ("0.7:/a,0.3:/b c", ["/a", "/b c"], [(0, (0.7, 0.3))]),
        ("1:a", ["a"], [(0, (1.0,))]),
        ("a;from=8e9,b", ["a", "b"], [(0, (1.0, 0.0)), (8 * 10**9, (0.0, 1.0))]),
        (
            "0.9:a,0.1:gs://b/c;from=1_000,1:d,3:a;from=2500,d",
            ["a", "gs://b/c", "d"],
            [(0, (0.9, 0.1, 0.0)), (1000, (0.75, 0.0, 0.25)), (2500, (0.0, 0.0, 1.0))],
        ),
    ],
)
def test_sources_stages_and_shares(source, names, stages):
    read_names, read_stages = read_source(source)
    assert read_names == names and [stage.starts for stage in read_stages] == [starts for starts, _ in stages]
    assert [tuple(map(float, stage.shares)) for stage in read_stages] == [shares for _, shares in stages]
    assert join_source(split_source(source)) == source
    assert sum(mean_shares(read_stages)) == pytest.approx(1)


def test_an_invalid_source_is_refused_by_name():
    mixtures = ["0.5:a,b", "0:a,1:b", "-1:a", "1:a,", f"{'9' * 400}:a,1:b", "1:a,1:a"]
    stages = ["0,b", "-5,b", "8G,b", ",b", "5", "9,b;from=9,a", "9,b;from=8,a", "9e99,b", "9,0.5:b,c"]
    for source in (*mixtures, *(f"a;from={rest}" for rest in stages)):
        with pytest.raises(UserError, match=re.escape(f"--data.source={source}: ")):
            read_source(source)


@pytest.mark.parametrize("shares", [("1",), ("0.5", "0.001", "0.499"), ("5/7", "1/7", "1/7")])
def test_a_stage_s_rows_are_those_that_grain_mixes_and_shares_are_exact(shares):
    parts = [grain.MapDataset.range(10**7).map(lambda n, i=i: (i, n)) for i in range(len(shares))]
    mixed = grain.MapDataset.mix(parts, [float(Fraction(share)) for share in shares])
    mixture = Mixture([stage(0, *shares)], LENGTH)
    assert all(mixture[n] == mixed[n] for n in (*range(2000), 999_999, 1_000_000))
    assert mixture.counts(7 * 10**9) == tuple(7 * 10**9 * Fraction(share) for share in shares)


def test_each_stage_has_its_shares_from_its_first_row_and_sources_continue():
    mixture = Mixture(STAGES, LENGTH)
    rows = [mixture[n] for n in range(500)]
    for starts, ends, (_, shares) in zip(BEGINS, [*BEGINS[1:], 500], STAGES):
        for i, share in enumerate(map(float, shares)):
            counts = np.cumsum([part == i for part, _ in rows[starts:ends]])
            assert np.abs(counts - share * np.arange(1, ends - starts + 1)).max() < 2
            assert share or not counts.any()
    for i in range(3):
        assert [number for part, number in rows if part == i] == list(range(sum(part == i for part, _ in rows)))
    for n in range(501):
        assert mixture.counts(n) == tuple(sum(part == i for part, _ in rows[:n]) for i in range(3))
    for source, size in enumerate((83, 11, 47)):
        n = mixture.row_after(source, size + 1, 600)
        assert mixture[n - 1] == (source, size)  # the row that comes a second time


def test_rows_are_one_sequence_s_for_any_size_of_a_step():
    """Take steps of 10 rows, then of 30 from row 90 on, across both boundaries."""
    mixture = Mixture(STAGES, LENGTH)
    expected = [RowSequence(ROWS, mixture, seed=3)[n] for n in range(400)]
    batches = lambda width, first: StepBatches(ROWS, mixture, 3, (1, width, LENGTH), np.arange(width), first_row=first)
    small, large = batches(10, 0), batches(30, 90)
    numbers = [*map(small.row_numbers, range(9)), *map(large.row_numbers, range(10))]
    assert [row for rows in numbers for row in rows] == expected[:390]
    assert np.array_equal(batches(10, 120)[0]["inputs"], large[1]["inputs"][:, :10])
    first, last = ([row for part, row in expected if part == i] for i in (0, 2))  # epochs continue across stages
    assert sorted(first[:83]) == list(range(83))  # 90% of 101 rows, and the next stage
    assert sorted(last[:47]) == sorted(last[47:94]) == list(range(47)) and last[:47] != last[47:94]
