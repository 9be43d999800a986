"""A network to measure or to sample, from a run or from a folder."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import Config
from data.tokenizer import TextTokenizer, load_tokenizer
from evaluation.generation import Generate, make_generate
from evaluation.scorer import Scorer
from interchange.init_from import config_of, is_network, read_params, require_same_network
from run.folder import record_of
from run.saved_run import load_run
from training.state import abstract_params, compute_dtype, params_sha256


@dataclass(frozen=True)
class Network:
    """A network with its parameters on a mesh."""

    config: Config
    tokenizer: TextTokenizer
    params: dict
    mesh: Mesh
    step: int | None = None
    """The step of a run's checkpoint. None: the network is from a folder."""
    dataset: str = ""
    """Fingerprint of the text that a run was trained on."""
    is_average: bool = False
    """True if the parameters are the average of a run's."""

    @property
    def label(self) -> str:
        """Name the network in names of files."""
        return "network" if self.step is None else f"step_{self.step}" + "_average" * self.is_average

    @property
    def title(self) -> str:
        """Name the network in pictures."""
        return self.label.replace("_", " ")

    @property
    def step_line(self) -> dict[str, int]:
        """Return a run's step, and whether it is its average, for the results that a user reads."""
        return ({} if self.step is None else {"step": self.step}) | ({"average": True} if self.is_average else {})

    @property
    def dtype(self) -> jnp.dtype:
        return compute_dtype(self.config.model, jax.default_backend())

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Identify the parameters: by the run's step and their SHA-256."""
        return self.step_line | {"params_sha256": params_sha256(self.params, self.config.model)}

    def scorer(self, longest: int | None = None) -> Scorer:
        return Scorer(self.config.model, self.config.batch, self.dtype, self.mesh, longest)

    def generate(self) -> Generate:
        return make_generate(self.config.model, self.dtype, self.mesh)


def open_network(folder: str | Path, mesh: Mesh, step: int | None = None, average: bool = True) -> Network:
    """Return the network in a folder on this machine, or of a run's checkpoint: of `step`, or the newest, with the
    average of its parameters if that is asked for and there. Raise UserError if neither is there, or if the network is
    not one of ours."""
    tokenizer = load_tokenizer(tokenizer_folder(folder))
    if is_network(folder):
        config = config_of(folder)
        require_same_network(config)
        return Network(config, tokenizer, read_params(config, abstract_params(config.model, mesh)), mesh)
    run = load_run(folder, mesh, step, average)
    return Network(run.config, tokenizer, run.params, mesh, run.step, run.dataset, run.is_average)


def tokenizer_folder(folder: str | Path) -> Path:
    """Return where a run or a network has its tokenizer. Raise UserError if a folder is neither."""
    if is_network(folder):
        return Path(folder)
    record_of(folder)
    return Path(folder) / "tokenizer"
