"""Read a run's parameters a shard at a time."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from options.schema import Config, MeshConfig
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import RunFolder
from training.mesh import make_mesh
from training.optimizer import path_name
from training.sharded import shard_network


def read_in_shards(
    folder: RunFolder, max_bytes: int, step: int | None = None
) -> tuple[Config, int, Iterator[dict[str, np.ndarray]]]:
    """Return a run's Config, a checkpoint's step (`step`, or the newest), and its float32 parameters by their dotted
    names: at most `max_bytes` at a time, or one that is larger, so a network larger than the memory can be read."""
    _, config = config_of_run(folder)
    checkpoints = Checkpoints(folder)
    step = checkpoints.asked(step)
    mesh = make_mesh(MeshConfig(data=1), jax.local_devices()[:1])
    abstract = shard_network(config.model, jnp.dtype("float32"), mesh).abstract_params()
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
