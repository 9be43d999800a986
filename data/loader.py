"""Batches as a pure function of (rows, seed, step): no iterator has a state that would have to be saved.

Step t takes rows t*G .. t*G + G - 1 of an endless sequence: a fresh permutation of all rows each epoch. Row i of a
step's G is row i % B of micro-batch i // B, on whichever device the mesh puts it; a process reads only its own.
"""

import sys
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from data.packing import Row, StreamRows


class StepBatches:
    """Random access by step to this process's part of each batch: arrays [K, B / processes, T]."""

    def __init__(self, rows: StreamRows, seed: int, shape: tuple[int, int, int], local_rows: np.ndarray):
        self.order: Any = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()
        self.shape = shape
        self.local_rows = local_rows

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        micro_batches, width, _ = self.shape
        first = int(index) * micro_batches * width
        indices = first + np.arange(micro_batches)[:, None] * width + self.local_rows
        return stack([self.order[int(index)] for index in indices.flat], indices.shape)


def stack(rows: list[Row], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows to arrays [*shape, T]."""
    return {name: np.stack([row[name] for row in rows]).reshape(*shape, -1) for name in Row.__annotations__}


def local_rows(shape: tuple[int, int, int], sharding: NamedSharding) -> np.ndarray:
    """Which rows of each micro-batch this process's devices hold, in ascending order."""
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    slices = {index[1].indices(shape[1])[:2] for index in indices}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(slices)])


def to_devices(batch: dict[str, np.ndarray], shape: tuple[int, int, int], sharding: NamedSharding) -> Any:
    """This process's part of a batch as its part of the global arrays [K, B, T]."""
    make = jax.make_array_from_process_local_data
    return {name: make(sharding, array, shape) for name, array in batch.items()}


def train_batches(
    rows: StreamRows,
    seed: int,
    shape: tuple[int, int, int],
    sharding: NamedSharding,
    start: int,
    workers: int,
) -> Iterator[Any]:
    """The batches of steps `start`, `start + 1`, ... without end, on the devices, read ahead by `workers` threads."""
    steps = StepBatches(rows, seed, shape, local_rows(shape, sharding))
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    for batch in grain.MapDataset.source(steps)[start:].to_iter_dataset(options):
        yield to_devices(batch, shape, sharding)


def held_out_batches(
    rows: StreamRows, tokens: int, token_bytes: np.ndarray, shape: tuple[int, int, int], sharding: NamedSharding
) -> tuple[list[Any], int]:
    """`tokens` tokens in rows spread evenly over all rows, on the devices, and how many bytes of text their targets
    stand for. Targets that stand for no text (the BOS) have weight 0, as have the rows that fill the last batch up.
    """
    micro_batches, width, length = shape
    count = min(len(rows), max(tokens // length, 1))
    chosen = [i * len(rows) // count for i in range(count)]
    mine = local_rows(shape, sharding)
    filler = Row(
        inputs=np.zeros(length, np.int32), targets=np.zeros(length, np.int32), weights=np.zeros(length, np.float32)
    )
    batches = []
    for first in range(0, count, micro_batches * width):
        indices = first + np.arange(micro_batches)[:, None] * width + mine
        batch = stack([rows[chosen[i]] if i < count else filler for i in indices.flat], indices.shape)
        batch["weights"] *= token_bytes[batch["targets"]] > 0
        batches.append(to_devices(batch, shape, sharding))
    return batches, sum(int(token_bytes[rows[i]["targets"]].sum()) for i in chosen)
