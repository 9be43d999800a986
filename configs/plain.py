"""configs/small.py as nanochat's plain network under AdamW, of 5 M parameters.

What the options are measured against (docs/recipe.md), and what transformers can load.

On 2026-11-21, on two shared AMD EPYC cores (JAX 0.12.0.1, bfloat16), 488 steps in place of its 300 reached 1.467 bits
per byte, the mean of three seeds, at 12,100 tokens/s, or 165 s of steps. What 300 steps reach was not written down.
"""

from dataclasses import replace

from configs import small
from configs.schema import Config, ModelConfig, OptimizerConfig


def get_config() -> Config:
    network = ModelConfig(depth=4, width=256, heads=4, kv_heads=4, head_dim=64, vocab_size=4096, loss_chunks=4)
    return replace(small.get_config(), name="plain", model=network, optimizer=OptimizerConfig())
