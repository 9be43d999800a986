"""A network in a folder, to train on from or to measure: a run's, one that export.py wrote, or a published nanochat in
transformers' format."""

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from configs.schema import BatchConfig, Config, ModelConfig, UserError, resolved, roles, validate
from data.tokenizer import TextTokenizer, load_tokenizer
from interchange.remote_code import TABLE, model_of_remote, remote_name
from interchange.safetensors import stored_arrays
from interchange.transformers import HF_TABLE, beyond_hf, hf_config, hf_name, turned
from model.attention import window_of
from run.checkpoint import Checkpoints
from run.folder import record_of
from run.record import at_hand
from training.optimizer import path_name
from training.state import split_model

TOKENS_AT_A_TIME = 16_384  # of a network that is measured, on a device


def is_network(folder: str | Path) -> bool:
    """Whether a folder holds a network's arrays, as no run's folder does."""
    return any(Path(folder).expanduser().glob("*.safetensors"))


def is_run(folder: Path) -> bool:
    """Whether a folder's config.json is a run's, and not that of transformers."""
    return (folder / "config.json").exists() and "config" in _read_json(folder / "config.json")


def architecture_of(folder: str | Path) -> str:
    """As config.json names it; what export.py wrote as plain safetensors is `tokensum`, too."""
    path = Path(folder) / "config.json"
    return "tokensum" if not path.exists() else str(_read_json(path).get("model_type"))


def config_of(folder: str | Path) -> Config:
    """The Config whose `init_from` is this folder, to measure it with. UserError where it holds another architecture
    than ours."""
    path, kind = Path(folder), architecture_of(folder)
    theirs = _read_json(path / "config.json") if (path / "config.json").exists() else {}
    length = theirs.get("max_position_embeddings", BatchConfig().sequence_length)
    rows = max(1, TOKENS_AT_A_TIME // length)
    config = Config(name=path.resolve().name, init_from=str(path), batch=BatchConfig(length, rows * length, rows))
    if kind == "tokensum":
        return replace(config, model=_stored_model(path, config))
    if kind != "nanochat":
        raise UserError(
            f"{folder} holds a network of the architecture {kind}, not one of ours (nanochat, tokensum); it can be "
            "measured with lm-evaluation-harness alone: --tasks=hellaswag,..."
        )
    try:
        heads, width = theirs["num_attention_heads"], theirs["hidden_size"]
        rope = theirs.get("rope_parameters") or theirs
        model = ModelConfig(
            depth=theirs["num_hidden_layers"],
            width=width,
            heads=heads,
            kv_heads=theirs.get("num_key_value_heads") or heads,
            head_dim=theirs.get("head_dim") or width // heads,
            vocab_size=theirs["vocab_size"],
            softcap=theirs.get("final_logit_softcapping", 15.0),
            rotary_base=rope.get("rope_theta", 10_000.0),
        )
    except LookupError as error:
        raise UserError(f"{path / 'config.json'} does not say {error}") from error
    return resolved(replace(config, model=model))


def _tokenizer_folder(config: Config) -> Path | None:
    """Return the folder with the tokenizer of `config.init_from`, or None if it has none."""
    origin = at_hand(config.init_from)
    folder = origin / "tokenizer" if is_run(origin) else origin
    return folder if (folder / "tokenizer.json").exists() else None


def require_same_vocabulary(config: Config, tokenizer: TextTokenizer) -> None:
    """Raise UserError if `config.init_from` has another vocabulary than the data."""
    folder = _tokenizer_folder(config)
    if folder and load_tokenizer(folder).library.get_vocab() != tokenizer.library.get_vocab():
        raise UserError(
            f"{config.init_from} holds another vocabulary than the data were made with; prepare the data with "
            f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
        )


def why_no_training(config: Config) -> str:
    """Return why no tokenizer may be trained for a run that starts from `config.init_from`, or "" if one may be."""
    if not (folder := _tokenizer_folder(config)):
        return ""
    origin = f"--init_from={config.init_from}"
    return f"{origin} has a tokenizer, and the text would get another: give --data.tokenizer={folder}"


def require_same_network(config: Config) -> None:
    """Raise UserError if `config.init_from` holds a network that computes another function than the options ask for."""
    config = resolved(config)
    folder = at_hand(config.init_from)
    run = record_of(folder)[1] if is_run(folder) else None
    shapes = {} if run else {name: tuple(array.get_shape()) for name, array in stored_arrays(folder).items()}
    problems = _differences(run.model, config.model) if run else _other_options(folder, config)
    leaves = jax.tree_util.tree_leaves_with_path(split_model(config.model, jnp.dtype(jnp.float32))[1])
    wanted = {path_name(path): leaf.shape for path, leaf in leaves}
    name_of, transposed = _spelling(shapes)
    turn = lambda name, shape: shape[::-1] if transposed and name.endswith(".kernel") else shape
    wanted = {name_of(name): turn(name, shape) for name, shape in wanted.items()}
    for name in () if run else sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            problems.append(f"{name}: {shapes.get(name, 'missing')}, not {wanted.get(name, 'there')}")
    if problems:
        differences = "\n  ".join(problems)
        raise UserError(f"{config.init_from} is of another network than the options ask for:\n  {differences}")


def read_params(config: Config, abstract: dict) -> dict:
    """The parameters in `config.init_from`, of a network that is the same, padded and sharded as `abstract` is."""
    folder = at_hand(config.init_from)
    if is_run(folder):
        return Checkpoints(record_of(folder)[1].checkpoint.folder or folder).restore_params(abstract)[0]
    stored = stored_arrays(folder)
    name_of, transposed = _spelling(stored)

    def read(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        array = stored[name_of(name)][:]
        array = (turned(name, array) if transposed else array).astype(np.float32)
        array = np.pad(array, [(0, size - given) for size, given in zip(leaf.shape, array.shape)])
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(read, abstract)


def _spelling(stored: Collection[str]) -> tuple[Callable[[str], str], bool]:
    """How a folder names our parameters, and whether its matrices are [outputs, inputs], as torch's are."""
    if HF_TABLE in stored:
        return hf_name, True
    return (remote_name, True) if TABLE in stored else (str, False)


def _other_options(folder: Path, config: Config) -> list[str]:
    """What the folder's config says that no shape does, where the options differ."""
    if architecture_of(folder) == "tokensum" and any(map(Path.exists, _descriptions(folder))):
        return _differences(_stored_model(folder, config), config.model)
    if (folder / "config.json").exists():
        theirs, asked = _read_json(folder / "config.json"), hf_config(config, 0)
        asked |= {f"model.{name}": "in use" for name in beyond_hf(config.model)}
        theirs |= {name: "not there" for name in asked if name.startswith("model.")}
        for name in (
            "architectures",
            "max_position_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        ):
            del asked[name]
    else:
        return []
    return _different(theirs, asked)


def _differences(theirs: ModelConfig, asked: ModelConfig) -> list[str]:
    return _different(_function(theirs), _function(asked))


def _different(theirs: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    different = [name for name in asked if theirs.get(name) not in (None, asked[name])]
    return [f"{name}: {theirs[name]}, not {asked[name]}" for name in different]


def _function(model: ModelConfig) -> dict[str, Any]:
    """The options that make the function that a network computes; for how far its blocks see, the windows themselves,
    since several options may come to the same."""
    names = [name.removeprefix("model.") for name, of in roles().items() if name.startswith("model.") and not of]
    windows = [window_of(model, layer) for layer in range(model.depth)]
    values = {name: getattr(model, name) for name in names if name not in ("window_pattern", "short_window")}
    return values | {"positions that the blocks see back (window_pattern, short_window)": windows}


def _descriptions(folder: Path) -> tuple[Path, Path]:
    """Return where export.py describes a network: for transformers, which may have saved it again, and for others."""
    return folder / "config.json", folder / "tokensum.json"


def _stored_model(folder: Path, config: Config) -> ModelConfig:
    """Return the network that export.py described; what it does not name is as it was before there was a choice."""
    for_transformers, plain = _descriptions(folder)
    known, path = roles(), for_transformers if for_transformers.exists() else plain
    stored = _read_json(path)
    try:
        if path == plain:
            stored = {name: value for name, value in stored.items() if known.get(f"model.{name}") == set()}
        model = ModelConfig(**stored) if path == plain else model_of_remote(stored)
        validate(Config(name="stored", model=model))
        return resolved(Config(name="stored", model=model, batch=config.batch)).model
    except (UserError, LookupError, TypeError) as error:
        raise UserError(f"{path} describes no network: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read: it holds no options by name")
    return content
