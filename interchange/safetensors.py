"""Networks as plain safetensors: unchanged arrays under their dotted names, written one shard at a time."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.schema import Config, ModelConfig, UserError, roles
from data.tokenizer import TextTokenizer
from training.optimizer import path_name

Arrays = dict[str, Float[np.ndarray, "..."]]


def write_safetensors(out: Path, shards: Iterable[Arrays], config: Config, tokenizer: TextTokenizer) -> None:
    """Write a folder with the unchanged arrays under their dotted names."""
    facts = {"model_type": "tokensum", "max_position_embeddings": config.batch.sequence_length}
    content = json.dumps(facts | {"options": function_options(config.model)}, indent=2)
    write_folder(out, shards, {"config.json": content, "tokenizer.json": tokenizer.json})


def function_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options that determine a network's function."""
    return {name: getattr(model, name) for name, meanings in roles(ModelConfig).items() if not meanings}


def write_folder(out: Path, shards: Iterable[Arrays], files: dict[str, str]) -> None:
    """Write the new folder `out` atomically, one file per shard. Raise UserError if that fails."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # from an export that was killed
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_text(content)
        _write_shards(partial, shards)
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(folder: Path, shards: Iterable[Arrays]) -> None:
    """Write model.safetensors, or several with their index, named as transformers does."""
    written: list[list[str]] = []
    size = 0
    for arrays in shards:
        path = folder / f"{len(written)}.safetensors"
        save_file(arrays, path, metadata={"format": "pt"})
        shutil.copymode(folder / "tokenizer.json", path)  # others may read it; this library would allow nobody
        written.append(list(arrays))
        size += sum(array.nbytes for array in arrays.values())
        del arrays  # free it before the next one is read
    count = len(written)
    if count == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    weights = {array: name for name, arrays in zip(names, written) for array in arrays}
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def arrays_of(params: dict) -> Arrays:
    """Return the parameters by their dotted names."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays in a folder's files, by name, not yet read. Raise UserError if they are missing or
    incomplete."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no network: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, for an incomplete file
        raise UserError(f"the network in {folder} cannot be read: {error}") from error
