"""The fair track at its tiny size, for two CPU cores: the Python standard library (docs/track.md).

python -m bench.track

The network is configs/small.py at half the width, with nanochat's rate of Muon. It never changes, so that results
stay comparable. docs/track.md has what one seed reached.
"""

from dataclasses import replace

from configs import small
from configs.schema import BatchConfig, CheckpointConfig, Config, EvalConfig, MuonConfig


def get_config() -> Config:
    config = small.get_config()
    return replace(
        config,
        name="track",
        steps=128,
        # The type is given: `auto` differs between devices.
        model=replace(config.model, width=128, heads=2, kv_heads=2, dtype="float32"),
        optimizer=replace(config.optimizer, muon=MuonConfig()),
        batch=BatchConfig(sequence_length=256, tokens_per_step=2048, rows_per_device=8),
        checkpoint=CheckpointConfig(every_steps=64),
        eval=EvalConfig(every_steps=64, tokens=65_536, prompts=()),
    )
