"""nanochat's depth 12: 135 M parameters, for one or more accelerators.

2,520 steps are 1.3 B tokens: 12 for each parameter of a matrix product, nanochat's ratio. Point it at your own
text with --data.source=FOLDER; a tokenizer of 32,768 tokens is trained on it.

Not trained yet: its loss is unknown. One H100 made 546,000 tokens/s of it (docs/performance.md), so these steps would
take some 40 minutes there.
"""

from configs.schema import BatchConfig, Config, ModelConfig


def get_config() -> Config:
    return Config(
        name="d12",
        steps=2520,
        model=ModelConfig(depth=12, width=768, heads=6, kv_heads=6, head_dim=128, vocab_size=32768),
        batch=BatchConfig(sequence_length=2048, tokens_per_step=524_288),
    )
