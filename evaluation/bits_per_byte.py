"""Bits per byte of a run's held-out rows, and its standard error."""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from training.step import Batch, EvalStep


def ratio(bits: Sequence[float], sizes: Sequence[float | int]) -> tuple[float, float | None]:
    """Return total bits over total bytes, and the standard error of this ratio over documents (Cochran, Sampling
    Techniques, 1977, 6.3). The error is None for a single document."""
    numerators, denominators = np.array(bits, np.float64), np.array(sizes, np.float64)
    count, value = len(bits), float(numerators.sum() / denominators.sum())
    if count < 2:
        return value, None
    squares = np.sum((numerators - value * denominators) ** 2)
    return value, float(math.sqrt(count / (count - 1) * squares) / denominators.sum())


def evaluate(
    eval_step: EvalStep,
    params: dict,
    batches: list[Batch],
    text_bytes: Int[np.ndarray, "micro_batches"],
    watched: Callable[[list], Iterable] = iter,
) -> dict[str, float | None]:
    """Return `val_loss` in nats a token, and `val_bpb` in bits a byte with its standard error `val_bpb_stderr`.

    They count every target that represents text (not the BOS, as in nanochat). In conversations they count every token
    that an assistant writes, end tokens included. The shape of the batches and the mesh do not change the two means.
    The standard error is over micro-batches, each a stretch of the held-out text; it is None for a single one.
    `text_bytes` has the bytes of each micro-batch. `watched` shows the progress.
    """
    sums = [eval_step(params, batch) for batch in batches]
    losses, counts = (np.concatenate(parts) for parts in zip(*(map(np.asarray, of) for of in watched(sums))))
    some = text_bytes > 0  # a micro-batch may hold no row
    _, error = ratio((losses[some] / math.log(2)).tolist(), text_bytes[some].tolist())
    loss_sum = math.fsum(losses)
    return {
        "val_loss": loss_sum / int(counts.sum()),
        "val_bpb": loss_sum / math.log(2) / int(text_bytes.sum()),
        "val_bpb_stderr": error,
    }
