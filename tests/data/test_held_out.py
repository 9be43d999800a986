"""Test the held-out rows: which they are, whatever the batches' shape and the hosts, and what each host reads."""

from collections.abc import Sequence
from itertools import chain
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from data.held_out import HeldOut, read_held_out
from data.packing import PlannedRows, Row, StreamRows, plan_rows
from data.shards import TokenStream
from data.tokenizer import CHAT_TOKENS, TextTokenizer
from system.errors import UserError
from tests.data.test_loader import DOCUMENTS, LENGTH, PACKED, ROWS, VAL, sharding
from tests.hosts.processes import finish, start

SIZES = np.array([0, 1, 2, 3, 4])  # bytes of VAL's tokens


def tokenizer_of(sizes: np.ndarray) -> TextTokenizer:
    """Return a tokenizer whose tokens have these bytes."""

    class Sized(TextTokenizer):
        token_bytes = sizes
        added_bytes = 0

    return Sized("")


def counted(batches: list) -> list[tuple[int, int]]:
    """Return (input, target) of every target that counts, in the order of the rows."""
    return [
        pair
        for batch in jax.device_get(batches)
        for pair in zip(batch["inputs"][batch["weights"] > 0].tolist(), batch["targets"][batch["weights"] > 0].tolist())
    ]


@pytest.mark.parametrize(
    ("shape", "tokens"), [((1, 8), 1), ((2, 8), 10 * LENGTH), ((5, 24), 10 * LENGTH), ((1, 16), 10**9)]
)
def test_held_out_targets_and_bytes_do_not_depend_on_the_batches_shape(shape, tokens):
    held_out = read_held_out([VAL], [1.0], tokens, tokenizer_of(SIZES), (*shape, LENGTH), sharding())
    count = {1: 1, 10 * LENGTH: 10, 10**9: 97}[tokens]
    rows = [VAL[i * 97 // count] for i in range(count)]
    pairs = [pair for row in rows for pair in zip(row["inputs"].tolist(), row["targets"].tolist())]
    text_bytes = held_out.text_bytes()
    assert counted(held_out.batches) == [(i, target) for i, target in pairs if target != 0]
    assert text_bytes.sum() == sum(SIZES[target] for _, target in pairs)
    assert all(batch["inputs"].shape == (*shape, LENGTH) for batch in held_out.batches)
    parts = [part for batch in held_out.batches for part in np.asarray(batch["targets"] * batch["weights"].astype(int))]
    assert text_bytes.tolist() == [[SIZES[part].sum() for part in parts]]


def test_held_out_rows_of_a_mixture_follow_the_shares_and_padding_counts_no_bytes():
    rows, weights, ones = [ROWS, VAL], [0.4, 0.6], tokenizer_of(np.ones(999, int))
    held_out = read_held_out(rows, weights, 20 * LENGTH, ones, (1, 8, LENGTH), sharding())
    expected = [ROWS[i * 37 // 8]["targets"] for i in range(8)] + [VAL[i * 97 // 12]["targets"] for i in range(12)]
    targets = np.concatenate([np.asarray(batch["targets"])[0] for batch in held_out.batches])
    assert targets[:20].tolist() == [target.tolist() for target in expected]
    assert held_out.text_bytes().tolist() == [[8 * LENGTH, 0, 0], [0, 8 * LENGTH, 4 * LENGTH]]
    numbers = tokenizer_of(np.arange(99))
    held_out = read_held_out([PACKED], [1.0], 10**9, numbers, (1, 8, LENGTH), sharding())
    assert held_out.text_bytes().sum() == sum(target for _, target in counted(held_out.batches)) == DOCUMENTS.sum()


def test_held_out_rows_in_which_nothing_counts_are_refused():
    ids = {name: i for i, name in enumerate(CHAT_TOKENS, 1)}
    tokens = np.array([0, ids["<|user_start|>"], 20, ids["<|user_end|>"]])
    question = PlannedRows(TokenStream([tokens]), plan_rows("whole", np.array([0]), 4, 16), 0, 16, ids)
    held_out = read_held_out([question], [1.0], 10**9, tokenizer_of(np.ones(40, int)), (1, 8, 16), sharding())
    with pytest.raises(UserError, match="no text counts in the held-out rows of 16 tokens"):
        held_out.text_bytes()


class CountedRows(StreamRows):
    """Rows that note in `read` which of them are read."""

    def __init__(self, tokens: TokenStream):
        super().__init__(tokens, LENGTH)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Row:
        self.read.append(index)
        return super().__getitem__(index)


def test_each_host_reads_only_the_rows_of_its_own_devices(monkeypatch):
    """Let hosts read in turn 80 rows in two batches of 3 micro-batches, which have 16 rows more of padding."""
    shape = (3, 16, LENGTH)
    everywhere = sharding().devices_indices_map(shape)

    def read_by(devices: Sequence[jax.Device]) -> tuple[list[int], HeldOut]:
        rows, here = CountedRows(VAL.tokens), Mock(NamedSharding)
        here.addressable_devices_indices_map.return_value = {device: everywhere[device] for device in devices}
        held_out = read_held_out([rows], [1.0], 80 * LENGTH, tokenizer_of(SIZES), shape, here)
        return rows.read, held_out

    monkeypatch.setattr("jax.make_array_from_process_local_data", lambda sharding, array, shape: array)
    all_rows, alone = read_by(jax.devices())
    assert sorted(all_rows) == [i * 97 // 80 for i in range(80)]
    for hosts in (2, 4, 8):
        rows, parts = zip(*(read_by(jax.devices()[i * 8 // hosts :][: 8 // hosts]) for i in range(hosts)))
        assert sorted(chain(*rows)) == sorted(all_rows)
        assert max(map(len, rows)) <= -(-80 // 16) * 16 // hosts
        for i, batch in enumerate(alone.batches):
            for name, whole in batch.items():
                np.testing.assert_array_equal(np.concatenate([part.batches[i][name] for part in parts], axis=1), whole)
        np.testing.assert_array_equal(np.concatenate([part.row_bytes for part in parts], axis=1), alone.row_bytes)


OF_TWO = """
import jax, numpy as np
from data.held_out import read_held_out
from hosts.runtime import run_command, start_jax
def main():
    start_jax()
    from tests.data.test_held_out import SIZES, CountedRows, tokenizer_of
    from tests.data.test_loader import LENGTH, VAL, sharding
    rows = CountedRows(VAL.tokens)
    held_out = read_held_out([rows], [1.0], 80 * LENGTH, tokenizer_of(SIZES), (3, 16, LENGTH), sharding())
    print(len(rows.read), held_out.text_bytes().tolist())
    return 0
run_command(main)
"""


@pytest.mark.medium
def test_two_hosts_exchange_their_rows_bytes():
    alone = read_held_out([VAL], [1.0], 80 * LENGTH, tokenizer_of(SIZES), (3, 16, LENGTH), sharding())
    for said in finish(start(["-c", OF_TWO], ["-c", OF_TWO]), 0):
        assert said.splitlines()[-1] == f"40 {alone.text_bytes().tolist()}"
