import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.packing import StreamRows

streams = st.tuples(st.integers(0, 100), st.integers(1, 20))


@given(streams)
def test_every_token_but_the_first_is_a_target_once_short_of_the_tail(sizes):
    count, length = sizes
    rows = StreamRows(np.arange(count), length)
    targets = [target for i in range(len(rows)) for target in rows[i]["targets"].tolist()]
    assert targets == list(range(1, len(targets) + 1))
    assert 0 <= max(count - 1, 0) - len(targets) < length


@given(streams)
def test_targets_are_the_inputs_one_later_and_each_row_continues_the_one_before(sizes):
    count, length = sizes
    tokens = np.random.default_rng(count).integers(0, 999, count)
    rows = StreamRows(tokens, length)
    for i in range(len(rows)):
        row = rows[i]
        assert row["inputs"].tolist() == tokens[i * length : (i + 1) * length].tolist()
        assert row["targets"][:-1].tolist() == row["inputs"][1:].tolist()
        if i + 1 < len(rows):
            assert row["targets"][-1] == rows[i + 1]["inputs"][0]


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "int64"])
def test_rows_are_int32_and_all_their_targets_count(dtype):
    row = StreamRows(np.array([65535, 1, 2, 65534], dtype), 3)[0]
    assert (row["inputs"].tolist(), row["targets"].tolist()) == ([65535, 1, 2], [1, 2, 65534])
    assert row["inputs"].dtype == row["targets"].dtype == np.int32
    assert row["weights"].tolist() == [1, 1, 1]
