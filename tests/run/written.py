"""Write a run that has saved a state."""

from pathlib import Path

from data.tokenizer import BOS, CHAT_TOKENS
from data.tokenizer_formats import SPLIT, convert_tiktoken
from model.gpt import parameter_shapes
from options.schema import CheckpointConfig, Config
from run.config_json import write_config_json
from tests.run.checkpoints import opened
from training.state import TrainState

TOKENIZER = convert_tiktoken(
    {bytes([byte]): byte for byte in range(256)}, SPLIT, {name: 256 + i for i, name in enumerate((BOS, *CHAT_TOKENS))}
)


def write_run(folder: Path, config: Config, state: TrainState) -> None:
    """Write a run that has saved this state, on the devices, after one step."""
    write_config_json(folder / "config.json", config, "a text's", [])
    TOKENIZER.save(folder / "tokenizer")
    checkpoints = opened(folder, CheckpointConfig())
    checkpoints.save(1, state, {"tokens": 1, "shapes": parameter_shapes(config.model)})
    checkpoints.wait()
