"""Counts of parameters and floating-point operations, from the network's shapes."""

from collections import Counter

from configs.schema import ModelConfig
from model.kernels import window_of
from model.shapes import kinds


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters of each optimizer group. The plain network has only `embed`, `matrices` and
    `lm_head`."""
    counts = Counter()
    for parameter, count in kinds(config):
        counts[parameter.group] += count * parameter.size
    return dict(counts)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Return the FLOPs of one training token, forward and backward: 6 for each parameter of a `Linear`, plus attention.
    Attention takes 12 x heads x head_dim x sequence_length (or the window, if shorter) per block, without the causal
    discount.

    PaLM (arXiv:2204.02311, appendix B) and nanochat count in the same way, so MFU is comparable.
    """
    products = sum(count * parameter.size for parameter, count in kinds(config) if parameter.product)
    seen = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    return 6 * products + 12 * config.heads * config.head_dim * sum(seen)
