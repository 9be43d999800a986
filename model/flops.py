"""Parameters and floating-point operations, counted from the sizes alone."""

from configs.schema import SMEAR_CHANNELS, VALUE_GATE_CHANNELS, ModelConfig
from model.attention import has_value_embedding, window_of

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
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 8 * config.width**2
    table = config.vocab_size * config.width
    tables = sum(has_value_embedding(config, layer) for layer in range(config.depth))
    counts = {
        "embed": table,
        "matrices": config.depth * (attention + mlp) + tables * VALUE_GATE_CHANNELS * config.kv_heads,
        "lm_head": table,
        "value_embeds": tables * config.vocab_size * config.kv_heads * config.head_dim,
        "resid_lambdas": config.resid_lambdas * config.depth,
        "x0_lambdas": config.x0_lambdas * config.depth,
        "scalars": config.smear * (SMEAR_CHANNELS + 1) + config.backout,
    }
    return {group: count for group, count in counts.items() if count}


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one training token, forward and backward: 6 for each parameter of a matrix product, and
    12 x heads x head_dim x sequence_length (or the window, where it is shorter) a block for attention, its causal half
    not left out.

    The convention of PaLM (arXiv:2204.02311, appendix B) and of nanochat, so that MFU compares with theirs.
    """
    counts = parameter_counts(config)
    seen = [min(window_of(config, layer) or sequence_length, sequence_length) for layer in range(config.depth)]
    attention = 12 * config.heads * config.head_dim * sum(seen)
    gate = SMEAR_CHANNELS if config.smear else 0
    return 6 * (counts["matrices"] + counts["lm_head"] + gate) + attention


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a `jax.Device.device_kind`, or None where it is not known (every CPU)."""
    matches = [kind for kind in PEAK_FLOPS if kind in device_kind]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
