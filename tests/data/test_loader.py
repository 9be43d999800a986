from itertools import islice
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from configs.schema import MeshConfig
from data.loader import StepBatches, held_out_batches, local_rows, to_devices, train_batches
from data.packing import StreamRows
from training.mesh import batch_sharding, make_mesh

LENGTH = 4
ROWS = StreamRows(np.arange(37 * LENGTH + 1), LENGTH)  # row i has inputs 4i .. 4i + 3
SHAPE = (3, 8, LENGTH)


def row_numbers(batch) -> np.ndarray:
    return np.asarray(batch["inputs"])[..., 0] // LENGTH


def sequence(count: int, seed: int = 0) -> np.ndarray:
    """The first `count` rows of the endless sequence, one a step."""
    steps = StepBatches(ROWS, seed, (1, 1, LENGTH), np.arange(1))
    return np.array([row_numbers(steps[i]).item() for i in range(count)])


def sharding() -> NamedSharding:
    return batch_sharding(make_mesh(MeshConfig()))


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(np.asarray(a[name]), np.asarray(b[name])) for name in a)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_every_epoch_has_each_row_once_in_an_order_of_its_own(seed):
    epochs = sequence(3 * len(ROWS), seed).reshape(3, len(ROWS))
    assert (np.sort(epochs) == np.arange(len(ROWS))).all()
    orders = {tuple(epoch) for epoch in epochs.tolist()}
    assert len(orders | {tuple(range(len(ROWS)))}) == 4


def test_seeds_give_different_orders():
    assert not np.array_equal(sequence(len(ROWS), 0), sequence(len(ROWS), 1))


@pytest.mark.parametrize("shape", [(1, 24), (3, 8), (24, 1), (4, 6)])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_row_i_of_a_step_is_row_i_mod_B_of_microbatch_i_div_B(shape, step):
    """So whatever K and B are, the same tokens_per_step gives the same rows."""
    steps = StepBatches(ROWS, 0, (*shape, LENGTH), np.arange(shape[1]))
    expected = sequence(24 * 6)[24 * step : 24 * (step + 1)]
    assert row_numbers(steps[step]).tolist() == expected.reshape(shape).tolist()


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_read_the_parts_of_one_batch(hosts):
    whole = StepBatches(ROWS, 7, SHAPE, np.arange(8))[2]
    parts = [StepBatches(ROWS, 7, SHAPE, mine)[2] for mine in np.split(np.arange(8), hosts)]
    assert all(part["inputs"].shape == (3, 8 // hosts, LENGTH) for part in parts)
    assert equal(whole, {name: np.concatenate([part[name] for part in parts], axis=1) for name in whole})


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_a_host_reads_the_rows_of_its_own_devices(hosts):
    everywhere = sharding().devices_indices_map(SHAPE)
    for host, devices in enumerate(np.split(np.array(jax.devices()), hosts)):
        here = Mock(NamedSharding)
        here.addressable_devices_indices_map.return_value = {d: everywhere[d] for d in reversed(devices)}
        per_host = 8 // hosts
        assert local_rows(SHAPE, here).tolist() == list(range(host * per_host, (host + 1) * per_host))


def test_rows_land_on_the_device_that_the_mesh_gives_them():
    batch = StepBatches(ROWS, 0, SHAPE, np.arange(8))[0]
    for shard in to_devices(batch, SHAPE, sharding())["inputs"].addressable_shards:
        np.testing.assert_array_equal(shard.data, batch["inputs"][:, shard.device.id : shard.device.id + 1])


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("start", [0, 5, 1_000_000])
def test_iterating_from_any_start_with_any_workers_equals_random_access(start, workers):
    steps = StepBatches(ROWS, 3, SHAPE, np.arange(8))
    batches = list(islice(train_batches(ROWS, 3, SHAPE, sharding(), start, workers), 4))
    assert all(equal(batch, steps[start + i]) for i, batch in enumerate(batches))
    assert all(array.sharding == sharding() for array in batches[0].values())


# Held-out batches: a stream of 97 rows with a BOS (0 bytes) here and there.
SIZES = np.array([0, 1, 2, 3, 4])
VAL = StreamRows(np.random.default_rng(0).integers(0, 5, 97 * LENGTH + 1), LENGTH)


def counted(batches: list) -> list[tuple[int, int]]:
    """(input, target) of every target that counts, in the order of the rows."""
    return [
        pair
        for batch in jax.device_get(batches)
        for pair in zip(batch["inputs"][batch["weights"] > 0].tolist(), batch["targets"][batch["weights"] > 0].tolist())
    ]


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (1, 16), (5, 24)])
@pytest.mark.parametrize("tokens", [1, 10 * LENGTH, 10**9])
def test_held_out_targets_and_bytes_do_not_depend_on_the_batches_shape(shape, tokens):
    batches, text_bytes = held_out_batches(VAL, tokens, SIZES, (*shape, LENGTH), sharding())
    count = {1: 1, 10 * LENGTH: 10, 10**9: 97}[tokens]
    rows = [VAL[i * 97 // count] for i in range(count)]
    pairs = [pair for row in rows for pair in zip(row["inputs"].tolist(), row["targets"].tolist())]
    assert counted(batches) == [(i, target) for i, target in pairs if target != 0]
    assert text_bytes == sum(SIZES[target] for _, target in pairs)
    assert all(batch["inputs"].shape == (*shape, LENGTH) for batch in batches)


def test_the_rows_that_fill_the_last_batch_up_count_nothing():
    every_token_is_text = SIZES + 1
    batches, _ = held_out_batches(VAL, 10 * LENGTH, every_token_is_text, (1, 16, LENGTH), sharding())
    assert len(batches) == 1
    assert batches[0]["weights"].sum(axis=2).tolist() == [[LENGTH] * 10 + [0] * 6]


def test_targets_that_are_the_bos_count_nothing():
    batches, _ = held_out_batches(VAL, 10**9, SIZES, (1, 8, LENGTH), sharding())
    targets, weights = (np.concatenate([batch[name] for batch in batches]) for name in ("targets", "weights"))
    assert ((weights == 1) == (targets != 0)).all()


@pytest.mark.parametrize("count", [1, 2, 10, 36, 37])
def test_held_out_rows_are_spread_evenly(count):
    batches, _ = held_out_batches(ROWS, count * LENGTH, np.ones(999, np.int32), (1, 8, LENGTH), sharding())
    weights = np.concatenate([batch["weights"] for batch in batches])[..., 0]
    chosen = np.concatenate([row_numbers(batch) for batch in batches])[weights > 0]
    assert len(chosen) == count
    gaps = np.diff([*chosen, len(ROWS)])
    assert chosen[0] == 0
    assert gaps.max() - gaps.min() <= 1
