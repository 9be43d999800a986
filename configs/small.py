"""A GPT of 5 M parameters on the Python standard library's own source: no download, no GPU, no argument.

It has all of nanochat's later features, and Muon at twice nanochat's rate, which was better in three of three seeds
(docs/recipe.md). configs/plain.py is the same without them. `make train` takes less than five minutes on two
cores. docs/recipe.md says what other depths reach in the same seconds.
"""

from dataclasses import replace

from configs.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
)


def get_config() -> Config:
    return Config(
        name="small",
        steps=240,
        model=ModelConfig(
            depth=4,
            width=192,
            heads=4,
            kv_heads=4,
            head_dim=48,
            vocab_size=4096,
            loss_chunks=4,
            qk_scale=1.2,
            window_pattern="SSSL",
            value_embeddings=True,
            resid_lambdas=True,
            x0_lambdas=True,
            smear=True,
            backout=True,
        ),
        batch=BatchConfig(sequence_length=256, tokens_per_step=4096, rows_per_device=8),
        optimizer=OptimizerConfig(
            matrices=replace(OptimizerConfig().matrices, kind="muon"),
            muon=MuonConfig(peak_rate=0.04),  # docs/recipe.md
            # At the full rate from the first step, the loss jumps at step 5, and rounding grows tenfold (docs/step.md).
            x0_lambdas=replace(OptimizerConfig().x0_lambdas, warmup_steps=20),
        ),
        checkpoint=CheckpointConfig(every_steps=80),
        eval=EvalConfig(every_steps=120, tokens=65_536),
    )
