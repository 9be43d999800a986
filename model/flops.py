"""Parameters and floating-point operations, counted from the network's shapes alone."""

from collections import Counter

import jax
from flax import nnx

from configs.schema import ModelConfig
from model.attention import window_of
from model.gpt import abstract_model, map_parameters
from model.layers import Linear

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets, by a part of `jax.Device.device_kind`.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
}


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Parameters by optimizer group; of `embed`, `matrices` and `lm_head` alone in the plain network."""
    declared = map_parameters(lambda param: (param.get_metadata("group"), param.size), config)
    counts = Counter()
    for group, size in jax.tree.leaves(declared, is_leaf=lambda leaf: isinstance(leaf, tuple)):
        counts[group] += size
    return dict(counts)


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one training token, forward and backward: 6 for each parameter of a matrix product (every `Linear`'s),
    and 12 x heads x head_dim x sequence_length (or the window, where it is shorter) a block for attention, its causal
    half not left out.

    The convention of PaLM (arXiv:2204.02311, appendix B) and of nanochat, so that MFU compares with theirs.
    """
    modules = [module for _, module in nnx.iter_modules(abstract_model(config))]
    products = sum(module.kernel.size for module in modules if isinstance(module, Linear))
    seen = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    return 6 * products + 12 * config.heads * config.head_dim * sum(seen)


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a `jax.Device.device_kind`, or None where it is not known (every CPU)."""
    matches = [kind for kind in PEAK_FLOPS if kind in device_kind]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
