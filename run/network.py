"""A run's network, to measure it or to draw text from it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from data.tokenizer import TextTokenizer, load_tokenizer
from hosts.distributed import on_every_process
from options.schema import Config, MeshConfig
from options.validation import validate
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import folder_to_read
from training.dtype import compute_dtype
from training.mesh import sizes_of
from training.sharded import ShardedNetwork, shard_network


@dataclass(frozen=True)
class Network:
    """A network with its parameters on a mesh."""

    config: Config
    tokenizer: TextTokenizer
    params: dict
    sharded: ShardedNetwork
    step: int = 0
    """The checkpoint's."""
    dataset: str = ""
    """Fingerprint of the text that it was trained on; empty if that is not known."""


def open_network(run_dir: str | Path, mesh: Mesh, step: int | None = None) -> Network:
    """Return the network of a run's checkpoint of `step`, or of the newest. Raise UserError if there is none, or if the
    mesh cannot divide it, and NoCheckpoint if the checkpoint is damaged. Every process must call it."""
    folder = folder_to_read(run_dir)

    def read() -> tuple[dict[str, Any], Config, TextTokenizer]:
        facts, config = config_of_run(folder)
        validate(replace(config, mesh=MeshConfig(**sizes_of(mesh))))
        return facts, config, load_tokenizer(folder.fetched() / "tokenizer")

    facts, config, tokenizer = on_every_process(f"the run {run_dir}", read)
    sharded = shard_network(config.model, compute_dtype(config.model, jax.default_backend()), mesh)
    params, step = Checkpoints(folder).restore_params(sharded.abstract_params(), step)
    return Network(config, tokenizer, params, sharded, step, facts["dataset"])
