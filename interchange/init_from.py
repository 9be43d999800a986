"""Networks in folders, to train from or to measure: a run's, one from export.py, a published nanochat in transformers'
format, or nanochat's own checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from configs.schema import BatchConfig, Config, ModelConfig, UserError
from configs.validation import resolved, validate
from data.tokenizer import TextTokenizer, load_tokenizer
from hosts.distributed import Damaged, NoCheckpoint
from interchange import formats
from model.attention import window_of
from run.checkpoint import Checkpoints
from run.folder import record_of
from run.record import fetch_locally
from training.build import Build
from training.optimizer import path_name
from training.state import TrainState, split_model

OURS = ("nanochat", "tokensum")
"""Architectures that our network computes, as config.json names them."""
TOKENS_AT_A_TIME = 16_384  # in a measurement of a network, per device


def is_network(folder: str | Path) -> bool:
    """Return whether a folder has a network's arrays, as no run's folder does."""
    return formats.newest_checkpoint(folder) is not None or any(Path(folder).expanduser().glob("*.safetensors"))


def is_run(folder: Path) -> bool:
    """Return whether a folder's config.json is from a run, not from transformers."""
    return (folder / "config.json").exists() and "config" in _read_json(folder)


def config_of(folder: str | Path) -> Config:
    """Return the Config whose `init_from` is this folder, to measure it with. Raise UserError for other
    architectures."""
    if checkpoint := formats.newest_checkpoint(folder):
        try:
            config = formats.config_of_checkpoint(checkpoint, TOKENS_AT_A_TIME)
            config = resolved(replace(config, init_from=str(folder)))
            validate(config)
        except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the meta file of {checkpoint} describes no network of ours: {error!r}") from error
        return config
    path, theirs = Path(folder) / "config.json", _read_json(folder)
    kind = theirs.get("model_type")
    if kind not in OURS:
        raise UserError(
            f"{folder} has a network of the architecture {kind}, not one of ours ({', '.join(OURS)}); "
            f"lm-evaluation-harness measures it by itself: lm_eval --model hf --model_args pretrained={folder}"
        )
    try:
        length = theirs["max_position_embeddings"]
        rows = max(1, TOKENS_AT_A_TIME // length)
        config = Config(
            path.resolve().parent.name, init_from=str(folder), batch=BatchConfig(length, rows * length, rows)
        )
        if kind == "nanochat":
            model, describe = formats.model_of_hf(theirs), formats.hf_config
        else:
            options = theirs["options"]
            model = ModelConfig(**options | {"vocab_size": theirs.get("vocab_size", options["vocab_size"])})
            describe = formats.own_config
        validate(config := resolved(replace(config, model=model)))
        for name, ours in describe(config).items():
            if name not in ("architectures", "auto_map", "options") and theirs.get(name) not in (None, ours):
                raise UserError(f"{name} is {theirs[name]}, and our network has {ours}")
    except (UserError, LookupError, TypeError) as error:
        raise UserError(f"{path} describes another network than ours: {error}") from error
    return config


def network_config(folder: Path) -> Config:
    """Return the Config of a run, or of the network in a folder. Raise UserError if a folder is neither."""
    return record_of(folder)[1] if is_run(folder) or not is_network(folder) else config_of(folder)


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder with the tokenizer of a run or of a network, or None if it has none."""
    if formats.newest_checkpoint(folder):
        return formats.nanochat_tokenizer(folder)
    folder = folder / "tokenizer" if is_run(folder) else folder
    return folder if (folder / "tokenizer.json").exists() else None


def require_same_vocabulary(config: Config, tokenizer: TextTokenizer) -> None:
    """Raise UserError if `config.init_from` has another vocabulary than the data."""
    folder = tokenizer_in(fetch_locally(config.init_from))
    if folder and tokenizer.library.get_vocab() != load_tokenizer(folder).library.get_vocab():
        raise UserError(
            f"{config.init_from} has another vocabulary than the data; prepare the data with "
            f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
        )


def why_no_training(config: Config) -> str:
    """Return why no tokenizer may be trained for a run that starts from `config.init_from`, or "" if one may be."""
    if not (folder := tokenizer_in(fetch_locally(config.init_from))):
        return ""
    return (
        f"--init_from={config.init_from} has a tokenizer, and the text would get another: give "
        f"--data.tokenizer={folder}"
    )


def require_same_network(config: Config) -> None:
    """Raise UserError if the network in `config.init_from` computes another function than the options ask for."""
    config, folder = resolved(config), fetch_locally(config.init_from)
    arrays = {} if is_run(folder) else formats.stored_arrays(folder)
    theirs, asked = network_config(folder).model, config.model
    others = _function(theirs)
    problems = [
        f"{name}: {others[name]}, not {ours}" for name, ours in _function(asked).items() if others[name] != ours
    ]
    if arrays:
        problems += _wrong_shapes({name: tuple(array.get_shape()) for name, array in arrays.items()}, asked)
    if problems:
        differences = "\n  ".join(problems)
        raise UserError(f"{config.init_from} is of another network than the options ask for:\n  {differences}")


def _wrong_shapes(shapes: dict[str, tuple[int, ...]], model: ModelConfig) -> list[str]:
    name_of, transposed = formats.spelling(shapes)
    wanted = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(split_model(model, jnp.dtype(jnp.float32))[1]):
        name = path_name(path)
        wanted[name_of(name)] = leaf.shape[::-1] if transposed and name.endswith(".kernel") else leaf.shape
    return [
        f"{name}: {shapes.get(name, 'missing')}, not {wanted.get(name, 'there')}"
        for name in sorted(wanted.keys() | shapes.keys())
        if wanted.get(name) != shapes.get(name)
    ]


def _function(model: ModelConfig) -> dict[str, Any]:
    """Return what determines a network's function. Different options may give the same windows."""
    options = formats.function_options(model)
    del options["window_pattern"], options["short_window"]
    windows = [window_of(model, layer) for layer in range(model.depth)]
    return options | {"windows of the blocks (window_pattern, short_window)": windows}


def read_params(config: Config, abstract: dict) -> dict:
    """Return the parameters of the equal network in `config.init_from`, padded and sharded as `abstract`."""
    folder = fetch_locally(config.init_from)
    if is_run(folder):
        return Checkpoints(config.init_from).restore_params(abstract)[0]
    stored = formats.stored_arrays(folder)
    name_of, transposed = formats.spelling(stored)

    def read(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        array = stored[name_of(name)][:]
        array = (formats.turned(name, array) if transposed else array).astype(np.float32)
        array = np.pad(array, [(0, size - given) for size, given in zip(leaf.shape, array.shape)])
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(read, abstract)


def initial_state(built: Build) -> TrainState:
    """Return the state before step 0: from the seed, or from the network in `init_from`. Raise NoCheckpoint if the
    moments are asked for, and that run's newest checkpoint is damaged."""
    config = built.config
    if not config.init_from:
        return built.create_state()
    if not config.init_optimizer:
        return built.create_state()._replace(params=read_params(config, built.abstract_state.params))
    checkpoints = Checkpoints(config.init_from)
    try:
        state, _ = checkpoints.restore(checkpoints.newest, built.abstract_state)
    except Damaged as error:
        raise NoCheckpoint(f"checkpoint {checkpoints.newest} in {checkpoints.folder} is damaged: {error}") from error

    def zero(array: Array) -> Array:
        return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)

    return state._replace(step=zero(state.step), skipped_steps=zero(state.skipped_steps))


def require_moments(config: Config) -> None:
    """Raise UserError if `config.init_from` has no moments that `config.init_optimizer` could bring."""
    folder = fetch_locally(config.init_from)
    if not is_run(folder):
        raise UserError(f"--init_optimizer takes the moments of a run, and --init_from={config.init_from} is none")
    theirs, ours = network_config(folder).optimizer.matrices.kind, config.optimizer.matrices.kind
    if theirs != ours:
        raise UserError(
            f"--init_optimizer takes moments of the same optimizer, and {config.init_from} was trained with "
            f"--optimizer.matrices.kind={theirs}, not {ours}: give that, or --init_optimizer=False"
        )


def _read_json(folder: str | Path) -> dict[str, Any]:
    path = Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it is not a JSON object")
    return content
