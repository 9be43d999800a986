"""The held-out rows that an evaluation reads, each process its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from data.loader import Shape, local_rows, stack, to_devices
from data.packing import Row, Rows
from data.tokenizer import TextTokenizer
from system.errors import UserError

PADDING = -1  # the number of a row that only fills a micro-batch


class HeldOut(NamedTuple):
    """Held-out rows, on the devices."""

    batches: list[Any]
    """Arrays [K, B, T]."""
    row_bytes: Int[Array, "micro_batches B"]
    """Bytes of text that the targets of each row represent."""
    sources: Bool[np.ndarray, "datasets micro_batches"]
    """Whether a micro-batch has rows of a dataset."""

    def text_bytes(self) -> Int[np.ndarray, "datasets micro_batches"]:
        """Return the bytes of text of each micro-batch, under its dataset. Raise UserError if no target counts. Every
        process must call it: they exchange the rows' bytes through the devices."""
        of_rows = multihost_utils.process_allgather(self.row_bytes, tiled=True)
        of_micro_batches = of_rows.sum(axis=1, dtype=np.int64)
        if not of_micro_batches.any():
            few = f"no text counts in the held-out rows of {self.batches[0]['inputs'].shape[2]} tokens"
            raise UserError(f"{few}; give more text, or a larger --batch.sequence_length")
        return np.where(self.sources, of_micro_batches, 0)


def read_held_out(
    rows: Sequence[Rows],
    weights: Sequence[float],
    tokens: int,
    tokenizer: TextTokenizer,
    shape: Shape,
    sharding: NamedSharding,
    document_bos: int | None = None,
) -> HeldOut:
    """Return `tokens` held-out tokens, of which this process reads the rows of its own devices.

    Each dataset gives its share, in rows spread evenly over its rows, which fill micro-batches of their own. Targets
    without text (the BOS) have weight 0, except those that an assistant writes in conversations. Padding rows have
    weight 0, too.
    """
    micro_batches, width, length = shape
    places = held_out_places([len(part) for part in rows], weights, tokens, shape)
    zeros = np.zeros(length, np.int32)

    def read(source: int, number: int) -> Row:
        if number == PADDING:
            return Row(inputs=zeros, targets=zeros, weights=zeros.astype(np.float32))
        row = rows[source][number]
        if rows[source].chat_tokens is None:
            row["weights"] = row["weights"] * (tokenizer.token_bytes[row["targets"]] > 0)
        return row

    mine, batches, row_bytes = local_rows(shape, sharding), [], []
    for of_batch in places.reshape(-1, micro_batches, width, 2):
        own = [read(source, number) for source, number in of_batch[:, mine].reshape(-1, 2).tolist()]
        batch = stack(own, (micro_batches, len(mine)), document_bos)
        batches.append(to_devices(batch, shape, sharding))
        sizes = tokenizer.text_bytes(batch["inputs"], batch["targets"])
        row_bytes.append(np.sum(sizes * (batch["weights"] > 0), axis=2, dtype=np.int32))
    all_rows = (len(places) // width, width)
    on_devices = jax.make_array_from_process_local_data(sharding, np.concatenate(row_bytes), all_rows)
    return HeldOut(batches, on_devices, np.arange(len(rows))[:, None] == places[::width, 0])


def held_out_places(
    sizes: Sequence[int], weights: Sequence[float], tokens: int, shape: Shape
) -> Int[np.ndarray, "rows 2"]:
    """Return the dataset and the number of each held-out row, in complete batches. `sizes` are the datasets' rows."""
    micro_batches, width, length = shape
    places: list[tuple[int, int]] = []
    for source, (size, share) in enumerate(zip(sizes, weights)):
        count = min(size, max(round(tokens * share) // length, 1))
        places += [(source, i * size // count) for i in range(count)]
        places += [(source, PADDING)] * (-count % width)
    places += [(0, PADDING)] * (-len(places) % (micro_batches * width))
    return np.array(places)
