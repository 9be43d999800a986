from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.packing import PlannedRows, StreamRows, load_plan, plan_rows, save_plan
from data.shards import TokenStream

BOS = 0
streams = st.tuples(st.integers(0, 100), st.integers(2, 20))


def stream_rows(tokens, length: int) -> StreamRows:
    """Return rows of tokens in two shards, so that some cross shards."""
    tokens = np.asarray(tokens)
    return StreamRows(TokenStream(np.split(tokens, [len(tokens) // 3])), length)


@given(streams)
def test_every_token_between_the_first_and_the_tail_is_a_target_once(sizes):
    count, length = sizes
    rows = stream_rows(np.arange(count), length)
    targets = [target for i in range(len(rows)) for target in rows[i]["targets"].tolist()]
    inputs = [token for i in range(len(rows)) for token in rows[i]["inputs"].tolist()]
    assert inputs == list(range(len(inputs)))
    assert targets == list(range(1, len(targets) + 1))
    assert 0 <= max(count - 1, 0) - len(targets) < length


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "int64"])
def test_rows_are_int32_and_all_their_targets_count(dtype):
    row = stream_rows(np.array([65535, 1, 2, 65534], dtype), 3)[0]
    assert (row["inputs"].tolist(), row["targets"].tolist()) == ([65535, 1, 2], [1, 2, 65534])
    assert row["inputs"].dtype == row["targets"].dtype == np.int32
    assert row["weights"].tolist() == [1, 1, 1]


# Best fit. Token i of all documents is i + 1, so that each token can be recognised in any row.
documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def packed(
    sizes: list[int], length: int, headless: bool = False, packing: str = "best_fit", drop: bool = False
) -> tuple[np.ndarray, PlannedRows]:
    """Return the stream of documents of `sizes` tokens (a BOS included), and its rows."""
    starts = np.cumsum(sizes) - sizes
    tokens = np.arange(1, sum(sizes) + 1)
    tokens[starts[headless:]] = BOS
    plan = plan_rows(packing, starts, len(tokens), length, headless, drop)
    return tokens, PlannedRows(TokenStream(np.split(tokens, [len(tokens) // 2])), plan, BOS, length)


def counted(rows: PlannedRows) -> list[tuple[int, int]]:
    """Return every (input, target) that counts."""
    every = [rows[i] for i in range(len(rows))]
    return [
        pair
        for row in every
        for pair in zip(row["inputs"][row["weights"] > 0].tolist(), row["targets"][row["weights"] > 0].tolist())
    ]


@given(documents, st.integers(2, 20))
@example([1], 2)
@example([20, 21, 39, 40, 41], 20)
def test_best_fit_counts_every_token_as_a_target_once_after_the_token_before_it(sizes, length):
    tokens, rows = packed(sizes, length)
    ends_with_bos = [*tokens[1:].tolist(), BOS]
    assert Counter(target for _, target in counted(rows)) == Counter(tokens.tolist())
    # A piece from inside a document starts after its own BOS. Its first counted input is a token of the document.
    assert Counter(counted(rows)) == Counter(zip(tokens.tolist(), ends_with_bos))


@given(documents, st.integers(3, 20))
def test_a_stream_that_starts_inside_a_document_loses_only_its_first_token(sizes, length):
    tokens, rows = packed(sizes, length, headless=True)
    assert Counter(counted(rows)) == Counter(zip(tokens.tolist(), [*tokens[1:].tolist(), BOS]))
    assert all(rows[i]["inputs"][0] == BOS for i in range(len(rows)))


@given(documents, st.integers(2, 20))
def test_best_fit_rows_start_with_a_bos_and_cut_no_document_that_fits(sizes, length):
    tokens, rows = packed(sizes, length)
    for i in range(len(rows)):
        row = rows[i]
        assert row["inputs"][0] == BOS
        assert all(row[name].shape == (length,) for name in row)
        inside = [t for t, w in zip(row["inputs"].tolist(), row["weights"]) if w and t != BOS]
        for start, size in zip(np.cumsum(sizes) - sizes, sizes):
            document = set(tokens[start + 1 : start + size].tolist())
            assert size > length or not document & set(inside) or document <= set(inside)


@given(documents, st.integers(3, 20), st.booleans(), st.booleans())
@example([21, 21], 20, False, True)
@example([20, 21, 1], 20, True, True)
def test_whole_puts_a_document_or_its_beginning_into_one_row(sizes, length, headless, drop):
    tokens, rows = packed(sizes, length, headless, "whole", drop)
    targets, expected = [*tokens[1:].tolist(), BOS], Counter()
    for i, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes)):
        room = length - (headless and i == 0)  # it gets a BOS
        if size <= room or not drop:
            stop = start + min(size, room)
            expected.update(zip(tokens[start:stop].tolist(), targets[start:stop]))
    assert Counter(counted(rows)) == expected
    assert all(rows[i]["inputs"][0] == BOS and rows[i]["weights"].any() for i in range(len(rows)))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_best_fit_rows_are_those_of_the_textbook_algorithm(sizes):
    """Put the pieces, longest first, each into the fullest row with room. A search through all rows finds that row."""
    length, left = 64, []
    for size in sorted(sizes, reverse=True):
        fits = [i for i, room in enumerate(left) if room >= size]
        if fits:
            left[min(fits, key=lambda i: left[i])] -= size
        else:
            left.append(length - size)
    _, rows = packed(sizes, length)
    assert len(rows) == len(left)
    assert sorted(length - int(rows[i]["weights"].sum()) for i in range(len(rows))) == sorted(left)


@pytest.mark.parametrize("length", [256, 2048])
def test_best_fit_pads_under_two_percent_of_documents_like_the_standard_librarys(length):
    lengths = np.random.default_rng(0).lognormal(np.log(2000), 1.4, 1700).astype(int) + 1  # like real documents
    plan = plan_rows("best_fit", np.cumsum(lengths) - lengths, int(lengths.sum()), length)
    assert 1 - lengths.sum() / length / (len(plan.rows) - 1) < 0.02


def test_a_plan_without_a_row_reads_back(tmp_path):
    save_plan([plan_rows("whole", np.array([0, 9]), 20, 8, drop=True)], tmp_path / "x")
    assert [a.tolist() for a in load_plan(tmp_path / "x")] == [[0], [], []]


def test_a_plan_reads_back_mapped_and_a_second_writer_is_harmless(tmp_path):
    plan = plan_rows("best_fit", np.array([0, 7, 9]), 30, 8)
    for _ in range(2):
        save_plan([plan], tmp_path / "plans" / "x")
    loaded = load_plan(tmp_path / "plans" / "x")
    assert all(isinstance(array, np.memmap) for array in loaded)
    assert [a.tolist() for a in loaded] == [a.tolist() for a in plan]
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["x"]
