"""The config of short runs, and their losses."""

from pathlib import Path

from run.folder import RunFolder

CONFIG = """
from configs.schema import *

STAYS = ScheduleConfig("constant")  # so that what a step does is the same, however many are to come

def get_config():
    return Config(
        name="tiny",
        steps=6,
        model=ModelConfig(depth=1, width=32, heads=2, kv_heads=1, head_dim=16, vocab_size=300, dtype="float32"),
        data=DataConfig(source="text", val_fraction=0.2),
        batch=BatchConfig(sequence_length=32, tokens_per_step=128, rows_per_device=4),
        optimizer=OptimizerConfig(
            GroupConfig(0.2), MatricesConfig(0.002), GroupConfig(0.004), schedule=STAYS
        ),
        checkpoint=CheckpointConfig(every_steps=2),
        eval=EvalConfig(every_steps=100, tokens=500, prompts=(), sample_tokens=8),
        log=LogConfig(every_steps=1),
    )
"""


def losses(run_dir: Path) -> dict[int, float]:
    """Return the training loss of each logged step."""
    return {line["step"]: line["loss"] for line in RunFolder(run_dir).metrics() if "loss" in line}
