"""A run's network, to measure or to sample it, and the options of commands that draw text."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import Config, MeshConfig
from configs.validation import validate
from data.tokenizer import TextTokenizer, load_tokenizer
from evaluation.evaluator import Generate, make_generate
from evaluation.scorer import Scorer
from hosts.distributed import on_every_process
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import RunFolder
from system.errors import UserError
from training.mesh import make_mesh, sizes_of
from training.sharded import ShardedNetwork, shard_network
from training.state import compute_dtype


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

    @property
    def mesh(self) -> Mesh:
        return self.sharded.mesh

    @property
    def dtype(self) -> jnp.dtype:
        return self.sharded.dtype

    def scorer(self, longest: int | None = None) -> Scorer:
        return Scorer(self.sharded, self.config.batch, longest)

    def generate(self) -> Generate:
        return make_generate(self.sharded)


def require_chat_tokens(tokenizer: TextTokenizer, run: str = "RUN") -> None:
    """Raise UserError if the tokenizer of `run` cannot encode conversations."""
    if missing := tokenizer.missing_chat_tokens:
        raise UserError(
            f"the network's tokenizer has no {', '.join(missing)}: it was not trained on conversations; fine-tune it: "
            f"python train.py --config=configs/chat.py --init_from={run}"
        )


def mesh_of_first(config: MeshConfig) -> Mesh:
    """Return a mesh of as many of the devices here as it needs. Raise UserError if there are too few."""
    count = config.data * config.fsdp * config.tensor
    return make_mesh(config, jax.devices()[:count] if count > 0 else None)


def open_network(run_dir: str | Path, mesh: Mesh, step: int | None = None) -> Network:
    """Return the network of a run's checkpoint of `step`, or of the newest. Raise UserError if there is none, or if the
    mesh cannot divide it, and NoCheckpoint if the checkpoint is damaged. Every process must call it."""

    folder = RunFolder(run_dir)

    def read() -> tuple[dict[str, Any], Config, TextTokenizer]:
        facts, config = config_of_run(folder)
        validate(replace(config, mesh=MeshConfig(**sizes_of(mesh))))
        return facts, config, load_tokenizer(folder.fetched() / "tokenizer")

    facts, config, tokenizer = on_every_process(f"the run {run_dir}", read)
    sharded = shard_network(config.model, compute_dtype(config.model, jax.default_backend()), mesh)
    params, step = Checkpoints(folder).restore_params(sharded.abstract_params(), step)
    return Network(config, tokenizer, params, sharded, step, facts["dataset"])
