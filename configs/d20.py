"""nanochat's depth 20: 477 M parameters, for one or more accelerators.

9,960 steps are 5.2 B tokens: 12 for each parameter of a matrix product, nanochat's ratio. Point it at your own
text with --data.source=FOLDER; a tokenizer of 32,768 tokens is trained on it.

Not run yet: its loss and hours are unknown. docs/performance.md describes its step, compiled for an H200.
"""

from configs.schema import BatchConfig, Config, ModelConfig


def get_config() -> Config:
    return Config(
        name="d20",
        steps=9960,
        model=ModelConfig(depth=20, width=1280, heads=10, kv_heads=10, head_dim=128, vocab_size=32768),
        batch=BatchConfig(sequence_length=2048, tokens_per_step=524_288),
    )
