"""The choice of attention's kernel, and the number of products of scores that it runs. Without JAX, for planning.

Attention multiplies twice for each score forward (queries by keys, shares by values) and four times backward. A kernel
that keeps no scores recomputes them, which makes five (arXiv:2205.14135).
"""

from functools import cache
from typing import Literal, NamedTuple

from configs.schema import ModelConfig

Kernel = Literal["splash", "cudnn", "blocks", "plain"]
"""`splash` and `cudnn` are the libraries' of TPUs and GPUs. `blocks` and `plain` are in model/attention.py: products of
some queries at a time whose scores the backward pass recomputes, or products whose scores it keeps."""

LANES = 128  # lanes of a TPU's vector unit: splash attention's blocks are multiples
BLOCK = 512  # the most positions in one of its blocks of queries or keys
SHORTEST_FOR_CUDNN = 64  # positions; for fewer, a cache's prefill and scoring gain nothing
KEPT = 2048  # the longest rows whose scores a CPU keeps for the backward pass


def has_bfloat16(platform: str, capability: float) -> bool:
    """Return whether a device multiplies bfloat16. GPUs do from Ampere on."""
    return platform not in ("gpu", "cuda") or capability >= 8


def attention_kernel(
    platform: str, capability: float, dtype: str, length: int, head_dim: int, documents: bool
) -> Kernel:
    """Return the kernel for rows of `length` positions, with `documents` masked or not.

    `capability` is a GPU's compute capability. cuDNN has kernels for Ampere and later, and for head sizes above 128 for
    Hopper and later. It would need a document mask as a matrix [batch, 1, length, length], or packed sequences. Their
    statistics take a float per head and token for each document that a row may have.
    """
    if platform == "tpu":
        return "splash" if splash_block(length) and head_dim % 64 == 0 else "blocks"
    if platform in ("gpu", "cuda"):
        largest = 256 if capability >= 9 else 128 if capability >= 8 else 0
        fits = head_dim % 8 == 0 and head_dim <= largest and length >= SHORTEST_FOR_CUDNN
        return "cudnn" if fits and dtype in ("bfloat16", "float16") and not documents else "blocks"
    return "plain" if length <= KEPT else "blocks"


def splash_block(length: int) -> int:
    """Return the largest block that divides a row, a multiple of LANES up to BLOCK; 0 if none does."""
    return next((size for size in range(BLOCK, 0, -LANES) if length % size == 0), 0)


def visible_blocks(length: int, window: int | None) -> int:
    """Return how many of splash attention's blocks contain a score that the mask leaves."""
    block, back = splash_block(length), length if window is None else window
    ends = range(block, length + 1, block)
    return sum((end - 1) // block - max(0, end - block - back) // block + 1 for end in ends)


class Products(NamedTuple):
    """Products per score times scores, for one head of a row."""

    forward: float
    backward: float


@cache
def products(kernel: Kernel, length: int, window: int | None) -> Products:
    """Return the products that a kernel runs, with masked scores of partly masked blocks and recomputed scores."""
    if kernel == "splash":  # one backward kernel takes 3 for queries' gradients, another 4 for keys' and values'
        scores = visible_blocks(length, window) * splash_block(length) ** 2
        return Products(2 * scores, 7 * scores)
    if kernel == "cudnn":  # its blocks are small
        window = min(length if window is None else window, length)
        scores = window * (length - window / 2)
        return Products(2 * scores, 5 * scores)
    scores = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in query_spans(length, window))
    return Products(2 * scores, (4 if kernel == "plain" else 5) * scores)


def window_of(config: ModelConfig, layer: int) -> int | None:
    """Return how many positions back a block sees; None: all. The last block sees all."""
    letter = "L" if layer == config.depth - 1 else config.window_pattern[layer % len(config.window_pattern)]
    if letter == "S" and config.short_window == 0:
        raise ValueError("model.short_window is 0: see configs.schema.resolved")
    return config.short_window if letter == "S" else None


def query_spans(length: int, window: int | None) -> list[tuple[slice, slice]]:
    """Return the chunks of queries (an eighth, at least 64) with the keys that they can see."""
    size, back = max(64, -(-length // 8)), length if window is None else window
    starts = range(0, length, size)
    return [(slice(i, min(i + size, length)), slice(max(0, i - back), min(i + size, length))) for i in starts]


def described(kernel: Kernel, length: int, head_dim: int) -> str:
    """Return a line that describes a kernel for rows of `length` positions and heads of `head_dim`."""
    return {
        "splash": f"splash attention, in blocks of {splash_block(length)} positions",
        "cudnn": "cuDNN's",
        "blocks": "products of some queries at a time, in linear memory: the platform's kernel does not take this "
        f"type, document mask, rows of {length} tokens or heads of {head_dim}",
        "plain": "products of some queries at a time",
    }[kernel]
