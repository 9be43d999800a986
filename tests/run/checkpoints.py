"""Open a run's checkpoints as a start does, save states in them, and compare them."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from model.gpt import parameter_shapes
from options.schema import CheckpointConfig
from run.folder import RunFolder
from run.recovery import open_cleared, restore_newest
from run.saver import Saver
from tests.helpers import sharded, tiny_config
from training.optimizer import make_optimizer
from training.state import TrainState, abstract_state, create_state

KEEP_ALL = CheckpointConfig(keep=99)
FACTS = {"shapes": parameter_shapes(tiny_config().model)}


def opened(
    folder: str | Path | RunFolder, config: CheckpointConfig, scores: Mapping[int, float] | None = None
) -> Saver:
    """Clear a run's folder of checkpoints, and return them, to save more."""
    run = folder if isinstance(folder, RunFolder) else RunFolder(folder)
    open_cleared(run)
    return Saver(run, config, scores or {})


def restored_newest(folder: str | Path, abstract: TrainState) -> tuple[TrainState, dict] | None:
    """Clear a run's folder of checkpoints, and return the newest state and its facts."""
    return restore_newest(open_cleared(RunFolder(folder)), abstract)


@cache
def state_on(devices: int) -> tuple[TrainState, TrainState, Mesh]:
    """Return a state on `devices` devices, its shapes, and their mesh. It is cached: never donate it."""
    config = tiny_config()
    network = sharded(config.model, (devices, 1, 1))
    optimizer, _ = make_optimizer(config.optimizer, network, 8)
    return create_state(network, optimizer, 0), abstract_state(network, optimizer), network.mesh


def assert_equal(a: TrainState, b: TrainState) -> None:
    """Require equal values in every leaf."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def changed(state: TrainState, by: int = 3) -> TrainState:
    """Return a state that differs from a fresh one in every leaf."""
    return jax.tree.map(lambda leaf: leaf + by, state)


def saved(
    folder: Path, steps: Sequence[int] = (3,), config: CheckpointConfig = KEEP_ALL, devices: int = 1, **facts: Mapping
) -> dict[int, TrainState]:
    """Save checkpoints with different states, and return the states by step. `facts` has values by step, too."""
    checkpoints = opened(folder, config)
    states = {step: changed(state_on(devices)[0], step) for step in steps}
    for step, state in states.items():
        checkpoints.save(step, state, FACTS | {name: value[step] for name, value in facts.items()})
    close(checkpoints)
    return states


def close(checkpoints: Saver) -> None:
    """Wait for the last save, as the end of a run does."""
    with checkpoints:
        pass


def names(folder: Path) -> list[str]:
    """Return the names in a run's folder of checkpoints, in the order of their steps."""
    return sorted((path.name for path in (folder / "checkpoints").iterdir()), key=lambda name: (len(name), name))
