"""What evaluation and sampling hold on a device while the state waits, in closed form."""

from math import ceil

from tools.plan.candidate import Candidate
from tools.plan.memory import kept_widths, memory

DRAWING = 4
"""Arrays [rows, vocabulary] in float32 that drawing a token takes: logits, those cut off, noise, and their sum."""


def evaluation_memory(of: Candidate, step: dict[str, float]) -> dict[str, float]:
    """Bytes on a device: `held-out rows`, which lie there all the time; and all that is there in an `evaluation`, and
    as prompts are continued (`sampling`). `step`: `memory(of)`."""
    config, (micro_batches, rows, length), sizes = of.config, of.step, of.sizes
    model, width = config.model, of.bytes_of_type
    of_batch = step["batch"]
    whole = micro_batches * rows * length * sizes["data"] * sizes["fsdp"]
    held_out = ceil(config.eval.tokens / whole) * of_batch
    state = step["parameters"] + step["moments"] + held_out + step["gathered copies"]
    # A block at a time, and the stream beside it; then the logits. Nothing is kept, so nothing is computed again.
    block = kept_widths(of)[1]
    forward = width * of.tokens * (max(block, model.vocab_size / model.loss_chunks / sizes["tensor"]) + model.width)
    prompts, positions = len(config.eval.prompts), min(length, config.eval.sample_tokens + 1)
    cache = 2 * model.depth * prompts * positions * max(1, model.kv_heads / sizes["tensor"]) * model.head_dim * width
    return {
        "held-out rows": held_out,
        "evaluation": state + forward,
        "sampling": state + cache + DRAWING * 4 * prompts * model.vocab_size,
    }


def most(step: float, evaluation: dict[str, float]) -> float:
    """What a device must have, of the bytes of a step and of `evaluation_memory`."""
    held_out, *others = evaluation.values()
    return max(step + held_out, *others)


def device_bytes(of: Candidate) -> float:
    """What a device must have, by closed form."""
    step = memory(of)
    return most(sum(step.values()), evaluation_memory(of, step))
