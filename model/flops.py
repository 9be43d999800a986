"""Parameters and floating-point operations, counted from the network's shapes alone."""

from collections import Counter

from configs.schema import ModelConfig
from model.kernels import window_of
from model.shapes import kinds


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by optimizer group; of `embed`, `matrices` and `lm_head` alone in the plain network."""
    counts = Counter()
    for parameter, count in kinds(config):
        counts[parameter.group] += count * parameter.size
    return dict(counts)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one training token, forward and backward: 6 for each parameter of a matrix product (every `Linear`'s),
    and 12 x heads x head_dim x sequence_length (or the window, where it is shorter) a block for attention, its causal
    half not left out.

    The convention of PaLM (arXiv:2204.02311, appendix B) and of nanochat, so that MFU compares with theirs.
    """
    products = sum(count * parameter.size for parameter, count in kinds(config) if parameter.product)
    seen = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    return 6 * products + 12 * config.heads * config.head_dim * sum(seen)
