"""The first state of a run from another run's network, and what must be the same in both."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from data.tokenizer import TextTokenizer, load_tokenizer
from hosts.distributed import on_first_process
from model.kernels import window_of
from options.schema import Config, ModelConfig, Role, roles
from options.validation import resolved
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import RunFolder, folder_to_read
from system.errors import Damaged, NoCheckpoint, UserError
from training.build import Build
from training.state import TrainState


def origin_of(config: Config, folder: RunFolder) -> RunFolder | None:
    """Return the run in `init_from`, whose network a run begins from; None without any, or if the run's own `folder`
    has a checkpoint. Every process must call it."""
    if not config.init_from or on_first_process(partial(folder.retried, folder.finished_steps)):
        return None
    return folder_to_read(config.init_from)


def require_same_vocabulary(origin: RunFolder, tokenizer: TextTokenizer) -> None:
    """Raise UserError if the run that another begins from has another vocabulary than the data."""
    folder = origin.fetched() / "tokenizer"
    if tokenizer.library.get_vocab() != load_tokenizer(folder).library.get_vocab():
        raise UserError(
            f"{origin} has another vocabulary than the data; prepare the data with "
            f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
        )


def why_no_new_tokenizer(origin: RunFolder) -> str:
    """Return why no tokenizer may be trained for a run that begins from another."""
    return (
        f"--init_from={origin} has a tokenizer, and the text would get another: give "
        f"--data.tokenizer={origin.fetched() / 'tokenizer'}"
    )


def require_same_network(config: Config, origin: RunFolder) -> None:
    """Raise UserError if the network of the run that this one begins from computes another function than the options
    ask for."""
    theirs, ours = _function(config_of_run(origin)[1].model), _function(resolved(config).model)
    if differ := [f"{name}: {theirs[name]}, not {value}" for name, value in ours.items() if theirs[name] != value]:
        differences = "\n  ".join(differ)
        raise UserError(f"{origin} is of another network than the options ask for:\n  {differences}")


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


def require_moments(config: Config, origin: RunFolder) -> None:
    """Raise UserError if the run that this one begins from has no moments that `init_optimizer` could bring."""
    theirs, ours = config_of_run(origin)[1].optimizer.matrices.kind, config.optimizer.matrices.kind
    if theirs != ours:
        raise UserError(
            f"--init_optimizer takes moments of the same optimizer, and {origin} was trained with "
            f"--optimizer.matrices.kind={theirs}, not {ours}: give that, or --init_optimizer=False"
        )


def initial_state(built: Build) -> TrainState:
    """Return the state before step 0: from the seed, or from the network of the run in `init_from`. Raise NoCheckpoint
    if that run's newest checkpoint is damaged."""
    config = built.config
    if not config.init_from:
        return built.create_state()
    checkpoints = Checkpoints(folder_to_read(config.init_from))
    if not config.init_optimizer:
        return built.create_state()._replace(params=checkpoints.restore_params(built.abstract_state.params)[0])
    try:
        state, _ = checkpoints.restore(checkpoints.newest, built.abstract_state)
    except Damaged as error:
        raise NoCheckpoint(f"checkpoint {checkpoints.newest} in {checkpoints.folder} is damaged: {error}") from error

    def zero(array: Array) -> Array:
        return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)

    return state._replace(step=zero(state.step), skipped_steps=zero(state.skipped_steps))
