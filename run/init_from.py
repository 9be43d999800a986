"""The first state of a run from another run's network, and what must be the same in both."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from configs.schema import Config, ModelConfig, Role, roles
from configs.validation import resolved
from data.tokenizer import TextTokenizer, load_tokenizer
from model.kernels import window_of
from run.checkpoint import Checkpoints
from run.folder import config_of_run
from run.record import fetch_locally
from system.errors import Damaged, NoCheckpoint, UserError
from training.build import Build
from training.state import TrainState


def require_same_vocabulary(config: Config, tokenizer: TextTokenizer) -> None:
    """Raise UserError if the run in `config.init_from` has another vocabulary than the data."""
    folder = fetch_locally(config.init_from) / "tokenizer"
    if tokenizer.library.get_vocab() != load_tokenizer(folder).library.get_vocab():
        raise UserError(
            f"{config.init_from} has another vocabulary than the data; prepare the data with "
            f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
        )


def why_no_new_tokenizer(config: Config) -> str:
    """Return why no tokenizer may be trained for a run that starts from `config.init_from`."""
    return (
        f"--init_from={config.init_from} has a tokenizer, and the text would get another: give "
        f"--data.tokenizer={fetch_locally(config.init_from) / 'tokenizer'}"
    )


def require_same_network(config: Config) -> None:
    """Raise UserError if the network of the run in `config.init_from` computes another function than the options ask
    for."""
    theirs, ours = _function(config_of_run(config.init_from)[1].model), _function(resolved(config).model)
    if differ := [f"{name}: {theirs[name]}, not {value}" for name, value in ours.items() if theirs[name] != value]:
        differences = "\n  ".join(differ)
        raise UserError(f"{config.init_from} is of another network than the options ask for:\n  {differences}")


def function_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options that determine a network's function."""
    return {
        name: getattr(model, name) for name, of in roles(ModelConfig).items() if not of & {Role.FREE, Role.TRAINING}
    }


def _function(model: ModelConfig) -> dict[str, Any]:
    """Return what determines a network's function. Different options may give the same windows."""
    options = function_options(model)
    del options["window_pattern"], options["short_window"]
    windows = [window_of(model, layer) for layer in range(model.depth)]
    return options | {"windows of the blocks (window_pattern, short_window)": windows}


def require_moments(config: Config) -> None:
    """Raise UserError if the run in `config.init_from` has no moments that `config.init_optimizer` could bring."""
    theirs, ours = config_of_run(config.init_from)[1].optimizer.matrices.kind, config.optimizer.matrices.kind
    if theirs != ours:
        raise UserError(
            f"--init_optimizer takes moments of the same optimizer, and {config.init_from} was trained with "
            f"--optimizer.matrices.kind={theirs}, not {ours}: give that, or --init_optimizer=False"
        )


def initial_state(built: Build) -> TrainState:
    """Return the state before step 0: from the seed, or from the network of the run in `init_from`. Raise NoCheckpoint
    if that run's newest checkpoint is damaged."""
    config = built.config
    if not config.init_from:
        return built.create_state()
    checkpoints = Checkpoints(config.init_from)
    if not config.init_optimizer:
        return built.create_state()._replace(params=checkpoints.restore_params(built.abstract_state.params)[0])
    try:
        state, _ = checkpoints.restore(checkpoints.newest, built.abstract_state)
    except Damaged as error:
        raise NoCheckpoint(f"checkpoint {checkpoints.newest} in {checkpoints.folder} is damaged: {error}") from error

    def zero(array: Array) -> Array:
        return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)

    return state._replace(step=zero(state.step), skipped_steps=zero(state.skipped_steps))
