"""Batches as a pure function of (rows, seed, position): no iterator has a state to save.

A step of G rows takes the next G of an endless sequence (data/order.py). Row i of a step's G is row i % B of
micro-batch i // B. The mesh determines its device, and each process reads only its own rows.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Int

from data.order import Mixture, RowSequence
from data.packing import Row, Rows

Shape = tuple[int, int, int]


@dataclass
class StepBatches:
    """Random access by step to this process's part of each batch: arrays [K, B / processes, T]."""

    rows: Sequence[Rows]
    mixture: Mixture
    seed: int
    shape: Shape
    local_rows: Int[np.ndarray, "local_rows"]
    document_bos: int | None = None
    first_row: int = 0
    """The sequence's row that begins batch 0."""

    @cached_property
    def sequence(self) -> RowSequence:
        """Return the endless sequence of rows."""
        return RowSequence(self.rows, self.mixture, self.seed)

    def __len__(self) -> int:
        return sys.maxsize

    def first_row_of(self, index: int) -> int:
        """Return the number of the sequence's rows before a batch."""
        return self.first_row + index * self.shape[0] * self.shape[1]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        micro_batches, width, _ = self.shape
        positions = self.first_row_of(int(index)) + np.arange(micro_batches)[:, None] * width + self.local_rows
        numbers = (self.sequence[position] for position in positions.ravel().tolist())
        return stack([self.rows[part][row] for part, row in numbers], positions.shape, self.document_bos)

    def row_numbers(self, index: int) -> list[tuple[int, int]]:
        """Return (dataset, row of it) for every row of a complete batch."""
        return [self.sequence[position] for position in range(self.first_row_of(index), self.first_row_of(index + 1))]


def stack(rows: list[Row], shape: tuple[int, ...], document_bos: int | None) -> dict[str, np.ndarray]:
    """Return rows as arrays [*shape, T]. With a `document_bos`, add segment ids, which change at each of these
    tokens."""
    batch = {name: np.stack([row[name] for row in rows]).reshape(*shape, -1) for name in Row.__annotations__}
    if document_bos is not None:
        batch["segment_ids"] = np.cumsum(batch["inputs"] == document_bos, axis=-1, dtype=np.int32)
    return batch


def local_rows(shape: Shape, sharding: NamedSharding) -> Int[np.ndarray, "local_rows"]:
    """Return the rows of each micro-batch on this process's devices, in ascending order."""
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    slices = {index[1].indices(shape[1])[:2] for index in indices}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(slices)])


def to_devices(batch: dict[str, np.ndarray], shape: Shape, sharding: NamedSharding) -> Any:
    """Return this process's part of a batch as its part of the global arrays [K, B, T]."""
    make = jax.make_array_from_process_local_data
    return {name: make(sharding, array, shape) for name, array in batch.items()}


def train_batches(batches: StepBatches, sharding: NamedSharding, workers: int) -> Iterator[Any]:
    """Yield the batches 0, 1, ... without end, on the devices. One batch is transferred ahead, so the loop waits
    neither for the transfer nor for threads at the interpreter. `workers` threads read ahead."""
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    read = iter(grain.MapDataset.source(batches).to_iter_dataset(options))
    placed = lambda: to_devices(next(read), batches.shape, sharding)
    placing = ThreadPoolExecutor(1, "placing")
    try:
        ahead = placing.submit(placed)
        while True:
            batch = ahead.result()
            ahead = placing.submit(placed)
            yield batch
    finally:  # without a wait: threads may wait for a disk
        placing.shutdown(wait=False, cancel_futures=True)
        read.close()
