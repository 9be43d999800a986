"""Validation loss, and bits per byte of text."""

import math
from collections.abc import Callable, Iterable

from training.step import Batch, EvalStep


def evaluate(
    eval_step: EvalStep,
    params: dict,
    batches: list[Batch],
    text_bytes: int,
    watched: Callable[[list], Iterable] = iter,
) -> dict[str, float]:
    """`val_loss` in nats a token and `val_bpb` in bits a byte, over every target that stands for text (the BOS does
    not, as in nanochat). The same whatever the batches' shape and the mesh. `watched` shows how far it is."""
    sums = [eval_step(params, batch) for batch in batches]
    done = [(float(loss), int(count)) for loss, count in watched(sums)]
    loss_sum, tokens = math.fsum(loss for loss, _ in done), sum(count for _, count in done)
    return {"val_loss": loss_sum / tokens, "val_bpb": loss_sum / math.log(2) / text_bytes}
