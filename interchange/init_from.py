"""Starting from a network in a folder: one that export.py wrote, or a published nanochat in transformers' format."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from configs.schema import Config, UserError
from data.tokenizer import TextTokenizer, load_tokenizer
from interchange.safetensors import stored_arrays
from interchange.transformers import HF_TABLE, beyond_hf, hf_config, hf_name, turned
from training.optimizer import path_name
from training.state import split_model


def require_same_network(config: Config, tokenizer: TextTokenizer) -> None:
    """UserError where `config.init_from` holds another network than the options ask for, or another vocabulary."""
    folder = Path(config.init_from)
    shapes = {name: tuple(array.get_shape()) for name, array in stored_arrays(folder).items()}
    if (folder / "tokenizer.json").exists():
        theirs, ours = (of.library.get_vocab() for of in (load_tokenizer(folder), tokenizer))
        if theirs != ours:
            raise UserError(
                f"--init_from={folder} holds another vocabulary than the data were made with; prepare the data with "
                f"--tokenizer={folder}, or give --data.tokenizer={folder} for raw text"
            )
    problems = _other_options(folder, config)
    leaves = jax.tree_util.tree_leaves_with_path(split_model(config.model, jnp.dtype(jnp.float32))[1])
    wanted = {path_name(path): leaf.shape for path, leaf in leaves}
    if HF_TABLE in shapes:
        wanted = {hf_name(name): shape[::-1] if name.endswith(".kernel") else shape for name, shape in wanted.items()}
    for name in sorted(wanted.keys() | shapes.keys()):
        if wanted.get(name) != shapes.get(name):
            problems.append(f"{name}: {shapes.get(name, 'missing')}, not {wanted.get(name, 'there')}")
    if problems:
        told = "\n  ".join(problems)
        raise UserError(f"--init_from={folder} is of another network than the options ask for:\n  {told}")


def read_params(config: Config, abstract: dict) -> dict:
    """The parameters in `config.init_from`, of a network that is the same, as `abstract`'s shapes and shardings say."""
    stored = stored_arrays(Path(config.init_from))
    name_of = hf_name if HF_TABLE in stored else str

    def read(path: tuple, leaf: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        array = stored[name_of(name)][:]
        array = (turned(name, array) if HF_TABLE in stored else array).astype(np.float32)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(read, abstract)


def _other_options(folder: Path, config: Config) -> list[str]:
    """What the folder's config says that no shape does, where the options differ."""
    if (folder / "tokensum.json").exists():
        told, asked = json.loads((folder / "tokensum.json").read_text()), dataclasses.asdict(config.model)
        free = ["dtype", "remat"]  # of speed
    elif (folder / "config.json").exists():
        told, asked = json.loads((folder / "config.json").read_text()), hf_config(config, 0)
        asked |= {f"model.{name}": "in use" for name in beyond_hf(config.model)}
        told |= {name: "not there" for name in asked if name.startswith("model.")}
        free = ["architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "max_position_embeddings"]
    else:
        return []
    common = [name for name in asked if name in told and name not in free]
    return [f"{name}: {told[name]}, not {asked[name]}" for name in common if told[name] != asked[name]]
