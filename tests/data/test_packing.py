from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.packing import PlannedRows, StreamRows, load_plan, plan_rows, save_plan
from data.shards import TokenStream

BOS = 0
some = settings(max_examples=40)
# Token i of all documents is i + 1, so that each token can be recognised in any row.
documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@some
@given(st.integers(0, 100), st.integers(2, 20), st.sampled_from(["<u2", "<u4", "int64"]))
def test_every_token_between_the_first_and_the_tail_is_a_target_once(count, length, dtype):
    tokens = np.arange(65_535 - count, 65_535, dtype=dtype)
    rows = StreamRows(TokenStream(np.split(tokens, [count // 3])), length)  # some rows cross shards
    every = [rows[i] for i in range(len(rows))]
    inputs, targets = ([token for row in every for token in row[name].tolist()] for name in ("inputs", "targets"))
    assert inputs == tokens[: len(inputs)].tolist() and targets == tokens[1 : len(targets) + 1].tolist()
    assert 0 <= max(count - 1, 0) - len(targets) < length
    assert all(row["inputs"].dtype == row["targets"].dtype == np.int32 and row["weights"].all() for row in every)


def packed(
    sizes: list[int], length: int, packing: str = "best_fit", drop: bool = False
) -> tuple[np.ndarray, PlannedRows]:
    """Return the stream of documents of `sizes` tokens (a BOS included), and its rows."""
    starts = np.cumsum(sizes) - sizes
    tokens = np.arange(1, sum(sizes) + 1)
    tokens[starts] = BOS
    plan = plan_rows(packing, starts, len(tokens), length, drop)
    return tokens, PlannedRows(TokenStream(np.split(tokens, [len(tokens) // 2])), plan, BOS, length)


def counted(row: dict) -> list[tuple[int, int]]:
    """Return every (input, target) of a row that counts."""
    counts = row["weights"] > 0
    return [*zip(row["inputs"][counts].tolist(), row["targets"][counts].tolist())]


@some
@given(documents, st.integers(2, 20))
@example([1], 2)
@example([20, 21, 39, 40, 41], 20)
def test_best_fit_counts_every_token_once_after_the_token_before_it_and_cuts_no_document_that_fits(sizes, length):
    tokens, rows = packed(sizes, length)
    every = [rows[i] for i in range(len(rows))]
    pairs = Counter(pair for row in every for pair in counted(row))
    # A piece from inside a document starts after its own BOS. Its first counted input is a token of the document.
    assert pairs == Counter(zip(tokens.tolist(), [*tokens[1:].tolist(), BOS]))
    for row in every:
        assert row["inputs"][0] == BOS and all(row[name].shape == (rows.length,) for name in row)
        inside = {token for token, _ in counted(row) if token != BOS}
        for start, size in zip(np.cumsum(sizes) - sizes, sizes):
            document = set(tokens[start + 1 : start + size].tolist())
            assert size > rows.length or not document & inside or document <= inside


@some
@given(documents, st.integers(3, 20), st.booleans())
@example([21, 21], 20, True)
@example([20, 21, 22, 1], 20, True)
def test_whole_puts_a_document_or_its_beginning_into_one_row(sizes, length, drop):
    tokens, rows = packed(sizes, length, "whole", drop)
    targets, expected = [*tokens[1:].tolist(), BOS], Counter()
    for start, size in zip(np.cumsum(sizes) - sizes, sizes):
        if size <= length + 1 or not drop:  # the last token is only a target
            stop = start + min(size, length)
            expected.update(zip(tokens[start:stop].tolist(), targets[start:stop]))
    every = [rows[i] for i in range(len(rows))]
    assert Counter(pair for row in every for pair in counted(row)) == expected
    assert all(row["inputs"][0] == BOS and row["weights"].any() for row in every)


@some
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
    assert sorted(length - int(rows[i]["weights"].sum()) for i in range(len(rows))) == sorted(left)


def test_a_plan_reads_back_mapped_and_a_second_writer_is_harmless(tmp_path):
    plan = plan_rows("best_fit", np.array([0, 7, 9]), 30, 8)
    for _ in range(2):
        save_plan([plan], tmp_path / "plans" / "x")
    loaded = load_plan(tmp_path / "plans" / "x")
    assert all(isinstance(array, np.memmap) for array in loaded)
    assert [a.tolist() for a in loaded] == [a.tolist() for a in plan]
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["x"]
    save_plan([plan_rows("whole", np.array([0, 10]), 20, 8, drop=True)], tmp_path / "empty")
    assert [a.tolist() for a in load_plan(tmp_path / "empty")] == [[0], [], []]
