"""The configs of short runs, and their losses."""

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
WITH_ROOM_FOR_ANSWERS = CONFIG.replace("kv_heads=1", "kv_heads=2").replace("sequence_length=32", "sequence_length=128")
"""The same for a network that reinforcement begins from."""
FEW_ANSWERS = """
from dataclasses import replace
from configs.reinforce import derive, get_config as recipe
from configs.schema import *

def get_config():
    few = ReinforceConfig(samples=4, prompts=4, held_out=6, difficulty=1, tokens=64)
    return replace(recipe(), steps=6, reinforce=few, checkpoint=CheckpointConfig(every_steps=2, keep=9))
"""
"""A run of reinforcement on it."""


def losses(run_dir: Path) -> dict[int, float]:
    """Return the training loss of each logged step."""
    return {line["step"]: line["loss"] for line in RunFolder(run_dir).metrics() if "loss" in line}
