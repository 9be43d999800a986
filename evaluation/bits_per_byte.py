"""Validation loss, and bits per byte of text."""

import math

from training.step import Batch, EvalStep


def evaluate(eval_step: EvalStep, params: dict, batches: list[Batch], text_bytes: int) -> dict[str, float]:
    """`val_loss` in nats a token and `val_bpb` in bits a byte, over every target that stands for text (the BOS does
    not, as in nanochat). The same whatever the batches' shape and the mesh."""
    sums = [eval_step(params, batch) for batch in batches]
    loss_sum = math.fsum(float(loss) for loss, _ in sums)
    tokens = sum(int(count) for _, count in sums)
    return {"val_loss": loss_sum / tokens, "val_bpb": loss_sum / math.log(2) / text_bytes}
