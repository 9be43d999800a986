"""The type of a run's activations for `model.dtype=auto`: it is chosen once, and kept on other machines."""

from functools import partial

import jax

from hosts.distributed import on_first_process
from options.schema import Config, with_options
from run.config_json import is_of_a_run, read_config_json
from run.folder import RunFolder
from run.status import has_steps
from system.messages import LOGGER
from training.dtype import fastest_dtype


def with_dtype(config: Config, folder: RunFolder) -> Config:
    """Return the config with a type of activations for `auto`, and log why: the one that the run began with, otherwise
    the faster one on the first process's devices. Every process must call it."""
    if config.model.dtype != "auto":
        return config
    begun = on_first_process(partial(folder.retried, dtype_of_run, folder))
    dtype, why = (begun, "the run began with it") if begun else on_first_process(lambda: fastest_dtype(_platform()))
    LOGGER.info(f"--model.dtype=auto: {dtype}, since {why}")
    return with_options(config, {"model.dtype": dtype})


def dtype_of_run(folder: RunFolder) -> str:
    """Return the type of activations that the run in a folder has; empty if it has no step. Raise UserError if its
    config.json cannot be read."""
    if not (is_of_a_run(folder.config_json) and has_steps(folder)):
        return ""
    return read_config_json(folder.config_json)[1].model.dtype


def _platform() -> str:
    return jax.devices()[0].platform
