"""A GPT of 18 M parameters for 1 to 100 MB of text: a language, a domain, one author.

python train.py --config=configs/few-data.py --data.source=FOLDER

The text is read `epochs` times, in another order each time, with dropout. A tokenizer of 4,096 tokens is trained on it.
docs/data.md has what was measured.
"""

from dataclasses import replace

from configs import small
from configs.schema import BatchConfig, CheckpointConfig, Config, EvalConfig


def get_config() -> Config:
    config = small.get_config()
    return replace(
        config,
        name="few-data",
        steps=0,
        epochs=4.0,
        model=replace(config.model, depth=6, width=384, heads=6, kv_heads=6, dropout=0.2),
        batch=BatchConfig(sequence_length=512, tokens_per_step=16_384),
        checkpoint=CheckpointConfig(every_steps=20),
        eval=EvalConfig(every_steps=20, tokens=65_536),
    )
