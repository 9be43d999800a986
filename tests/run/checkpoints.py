"""Open a run's checkpoints as a start does."""

from collections.abc import Mapping
from pathlib import Path

from configs.schema import CheckpointConfig
from run.folder import RunFolder
from run.recovery import open_cleared, restore_newest
from run.saver import Saver
from training.state import TrainState


def opened(
    folder: str | Path | RunFolder, config: CheckpointConfig, scores: Mapping[int, float] | None = None
) -> Saver:
    """Clear a run's folder of checkpoints, and return them, to save more."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    open_cleared(run)
    return Saver(RunFolder(run), config, scores or {})


def restored_newest(folder: str | Path, abstract: TrainState) -> tuple[TrainState, dict] | None:
    """Clear a run's folder of checkpoints, and return the newest state and its facts."""
    return restore_newest(open_cleared(RunFolder(folder)), abstract)
