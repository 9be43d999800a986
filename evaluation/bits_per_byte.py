"""Validation loss, and bits per byte of text."""

import math
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int

from evaluation.bits_of_texts import ratio
from training.step import Batch, EvalStep


def evaluate(
    eval_step: EvalStep,
    params: dict,
    batches: list[Batch],
    text_bytes: Int[np.ndarray, "micro_batches"],
    watched: Callable[[list], Iterable] = iter,
) -> dict[str, float | None]:
    """Return `val_loss` in nats a token, and `val_bpb` in bits a byte with its standard error `val_bpb_stderr`.

    They are over every target that stands for text (the BOS does not, as in nanochat). The two means are the same
    whatever the batches' shape and the mesh. The error is over micro-batches, each a stretch of the held-out text: None
    for a single one. `text_bytes` has each micro-batch's. `watched` shows how far it is.
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
