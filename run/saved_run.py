"""Read a run's checkpoints from other commands."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from configs.schema import Config, MeshConfig
from configs.validation import validate
from run.checkpoint import Checkpoints
from run.folder import record_of
from training.build import build
from training.mesh import make_mesh, sizes_of
from training.optimizer import path_name
from training.state import TrainState, abstract_params


class Run(NamedTuple):
    """The parts of a run that a command needs to use a checkpoint."""

    config: Config
    dataset: str
    """Fingerprint of the dataset it trains on."""
    params: dict
    """Float32 parameters over the replicas of the mesh."""
    step: int
    """The checkpoint's step."""


def load_run(run_dir: str | Path, mesh: Mesh, step: int | None = None) -> Run:
    """Return the run in `run_dir` with the parameters of the checkpoint of `step`, or of the newest. Raise UserError if
    there is no run or checkpoint, or if the mesh cannot divide its network, and NoCheckpoint if it is damaged."""
    facts, config = record_of(run_dir)
    validate(dataclasses.replace(config, mesh=MeshConfig(**sizes_of(mesh))))
    checkpoints = Checkpoints(run_dir)
    abstract = abstract_params(config.model, mesh)
    return Run(config, facts["dataset"], *checkpoints.restore_params(abstract, step))


def read_in_shards(
    run_dir: str | Path, max_bytes: int, step: int | None = None
) -> tuple[Config, int, Iterator[dict[str, np.ndarray]]]:
    """Return a run's Config, a checkpoint's step (`step`, or the newest), and its parameters (as `load_run`) by their
    dotted names: at most `max_bytes` at a time, or one that is larger, so a network larger than the memory can be
    read."""
    _, config = record_of(run_dir)
    checkpoints = Checkpoints(run_dir)
    step = checkpoints.asked(step)
    abstract = abstract_params(config.model, make_mesh(MeshConfig(data=1), jax.local_devices()[:1]))
    shards: list[dict[tuple, Any]] = [{}]
    size = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        nbytes = leaf.size * leaf.dtype.itemsize
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][tuple(part.key for part in path)] = leaf
        size += nbytes

    def read(shard: dict[tuple, Any]) -> dict[str, np.ndarray]:
        params, _ = checkpoints.restore_params(unflatten_dict(shard), step)
        return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    return config, step, map(read, shards)


def open_for_reading(run_dir: str | Path) -> tuple[Checkpoints, TrainState]:
    """Return a run's checkpoints, and the abstract state to restore on one device."""
    _, config = record_of(run_dir)
    built = build(dataclasses.replace(config, mesh=MeshConfig()), jax.devices()[:1])
    return Checkpoints(run_dir), built.abstract_state
