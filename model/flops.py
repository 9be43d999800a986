"""Parameters and floating-point operations, counted from the sizes alone."""

from configs.schema import ModelConfig

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
    """Parameters by optimizer group: `embed`, `matrices`, `lm_head`."""
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    mlp = 8 * config.width**2
    table = config.vocab_size * config.width
    return {"embed": table, "matrices": config.depth * (attention + mlp), "lm_head": table}


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one training token, forward and backward: 6 for each parameter of a matrix product, and
    12 x heads x head_dim x sequence_length a block for attention, its causal half not left out.

    The convention of PaLM (arXiv:2204.02311, appendix B) and of nanochat, so that MFU compares with theirs.
    """
    counts = parameter_counts(config)
    attention = 12 * config.depth * config.heads * config.head_dim * sequence_length
    return 6 * (counts["matrices"] + counts["lm_head"]) + attention


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a `jax.Device.device_kind`, or None where it is not known (every CPU)."""
    matches = [kind for kind in PEAK_FLOPS if kind in device_kind]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None
