import threading
from fractions import Fraction
from itertools import islice
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from data.loader import StepBatches, local_rows, to_devices, train_batches
from data.order import Mixture
from data.packing import PlannedRows, StreamRows, plan_rows
from data.shards import TokenStream
from options.schema import MeshConfig
from training.mesh import batch_sharding, make_mesh

LENGTH = 4
PARTS = (83, 60, 47)  # rows of a mixture's sources
ROWS = StreamRows(TokenStream([np.arange(37 * LENGTH + 1)]), LENGTH)  # row i has inputs 4i .. 4i + 3
SHAPE = (3, 8, LENGTH)

# A stream of 97 rows with a BOS (0 bytes) here and there.
VAL = StreamRows(TokenStream([np.random.default_rng(0).integers(0, 5, 97 * LENGTH + 1)]), LENGTH)
# Documents of one to three tokens, packed, with padding.
DOCUMENTS = np.array([0, 5, 0, 6, 7, 0, 8, 0, 9, 10] * 30)
PACKED = PlannedRows(
    TokenStream([DOCUMENTS]), plan_rows("best_fit", np.flatnonzero(DOCUMENTS == 0), 300, LENGTH), 0, LENGTH
)
KINDS: dict[str, dict] = {
    "stream": {},
    "best_fit": {"rows": [PACKED]},
    "mixture": {"rows": [ROWS, VAL], "weights": [0.3, 0.7]},
    "masked": {"rows": [PACKED], "bos": 0},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def step_batches(seed=0, shape=SHAPE, local=None, rows=(ROWS,), weights=(1.0,), bos=None, first_row=0) -> StepBatches:
    mixture = Mixture({f"{i:x}": Fraction(str(weight)) for i, weight in enumerate(weights)}, LENGTH)
    return StepBatches(rows, mixture, seed, shape, np.arange(shape[1]) if local is None else local, bos, first_row)


def row_numbers(batch) -> np.ndarray:
    return np.asarray(batch["inputs"])[..., 0] // LENGTH


def sequence(count: int, seed: int = 0) -> np.ndarray:
    """Return the first `count` rows of the endless sequence."""
    return np.array([row for _, row in step_batches(seed, (1, count, LENGTH)).row_numbers(0)])


def sharding() -> NamedSharding:
    return batch_sharding(make_mesh(MeshConfig()))


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(np.asarray(a[name]), np.asarray(b[name])) for name in a)


def test_every_epoch_has_each_row_once_in_an_order_of_its_own():
    firsts = set()
    for seed in (0, 1, 2**32 - 1):
        epochs = sequence(3 * len(ROWS), seed).reshape(3, len(ROWS))
        assert (np.sort(epochs) == np.arange(len(ROWS))).all()
        orders = [tuple(epoch) for epoch in epochs.tolist()]
        assert len({*orders, tuple(range(len(ROWS)))}) == 4
        firsts.add(orders[0])
    assert len(firsts) == 3
    mixed = step_batches(2**32 - 1, **KINDS["mixture"])  # a mixture takes every seed, too
    assert {part for part, _ in mixed.row_numbers(0)} == {0, 1}


@pytest.mark.parametrize("shape", [(1, 24), (3, 8), (24, 1)])
def test_row_i_of_a_step_is_row_i_mod_B_of_microbatch_i_div_B(shape):
    """The same tokens_per_step gives the same rows for any K and B."""
    steps, expected = step_batches(0, (*shape, LENGTH)), sequence(24 * 6)
    for step in (0, 1, 5):
        assert row_numbers(steps[step]).ravel().tolist() == expected[24 * step : 24 * (step + 1)].tolist()
        assert row_numbers(steps[step]).shape == shape


def test_rows_are_one_sequence_s_for_any_size_of_a_step():
    """Take steps of 10 rows, then of 30 from row 90 on."""
    rows = [
        StreamRows(TokenStream([np.arange(size * LENGTH + 1) + 10_000 * i]), LENGTH) for i, size in enumerate(PARTS)
    ]
    mixture = {"rows": rows, "weights": [0.6, 0.1, 0.3]}
    expected = list(step_batches(3, (1, 400, LENGTH), **mixture).row_numbers(0))
    batches = lambda width, first: step_batches(3, (1, width, LENGTH), first_row=first, **mixture)
    small, large = batches(10, 0), batches(30, 90)
    numbers = [*map(small.row_numbers, range(9)), *map(large.row_numbers, range(10))]
    assert [row for rows in numbers for row in rows] == expected[:390]
    assert np.array_equal(batches(10, 120)[0]["inputs"], large[1]["inputs"][:, :10])
    last = [row for part, row in expected if part == 2]  # epochs of a source follow each other
    assert sorted(last[:47]) == sorted(last[47:94]) == list(range(47)) and last[:47] != last[47:94]


@kinds
def test_hosts_read_the_parts_of_one_batch(kind):
    batch = step_batches(7, **kind)[2]
    for hosts in (1, 2, 4):
        parts = [step_batches(7, local=mine, **kind)[2] for mine in np.split(np.arange(8), hosts)]
        assert all(part["inputs"].shape == (3, 8 // hosts, LENGTH) for part in parts)
        assert equal(batch, {name: np.concatenate([part[name] for part in parts], axis=1) for name in batch})
    assert ("segment_ids" in batch) == ("bos" in kind)
    if "bos" in kind:  # segments begin with documents
        assert (np.diff(batch["segment_ids"], axis=-1) == (batch["inputs"][..., 1:] == 0)).all()


def test_a_host_reads_the_rows_of_its_own_devices():
    everywhere = sharding().devices_indices_map(SHAPE)
    for hosts in (1, 2, 4):
        for host, devices in enumerate(np.split(np.array(jax.devices()), hosts)):
            here = Mock(NamedSharding)
            here.addressable_devices_indices_map.return_value = {d: everywhere[d] for d in reversed(devices)}
            per_host = 8 // hosts
            assert local_rows(SHAPE, here).tolist() == list(range(host * per_host, (host + 1) * per_host))
    batch = step_batches()[0]
    for shard in to_devices(batch, SHAPE, sharding())["inputs"].addressable_shards:
        np.testing.assert_array_equal(shard.data, batch["inputs"][:, shard.device.id : shard.device.id + 1])


@kinds
@pytest.mark.parametrize(("start", "workers"), [(5, 0), (1_000_000, 4)])
def test_iterating_from_any_start_with_any_workers_equals_random_access(start, workers, kind):
    steps = step_batches(3, **kind)
    begun = step_batches(3, **kind, first_row=start * steps.shape[0] * steps.shape[1])
    batches = list(islice(train_batches(begun, sharding(), workers), 4))
    assert all(equal(batch, steps[start + i]) for i, batch in enumerate(batches))
    assert all(array.sharding == sharding() for array in batches[0].values())


def test_one_batch_is_prefetched_to_the_devices(monkeypatch):
    placed = threading.Semaphore(0)

    def placing(*args):
        batch = to_devices(*args)
        placed.release()
        return batch

    monkeypatch.setattr("data.loader.to_devices", placing)
    batches = train_batches(step_batches(3), sharding(), 2)
    for _ in range(3):
        next(batches)
        assert placed.acquire(timeout=60)
    assert placed.acquire(timeout=60) and not placed.acquire(blocking=False)
