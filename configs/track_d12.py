"""The fair track at the size of configs/plain.py --model.depth=12, for accelerators (docs/track.md).

python -m bench.track --size=d12

Its text is ClimbMix as docs/data.md prepares it, in datasets/climbmix. Not run yet: its loss and hours are unknown.
"""

from dataclasses import replace

from configs import plain
from configs.schema import Config, DataConfig, EvalConfig


def get_config() -> Config:
    config = plain.of_depth(12)
    return replace(
        config,
        name="track_d12",
        model=replace(config.model, dtype="bfloat16"),
        data=DataConfig(source="datasets/climbmix"),
        eval=EvalConfig(every_steps=config.steps // 4, prompts=()),
    )
