"""Networks as plain safetensors: the arrays as they are, under their dotted names."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from configs.schema import Config, UserError
from data.tokenizer import TextTokenizer
from training.optimizer import path_name

Arrays = dict[str, Float[np.ndarray, "..."]]


def write_safetensors(out: Path, params: dict, config: Config, tokenizer: TextTokenizer) -> None:
    """A folder with the arrays as they are, under their dotted names."""
    write_folder(out, arrays_of(params), tokenizer, {"tokensum.json": dataclasses.asdict(config.model)})


def write_folder(out: Path, arrays: Arrays, tokenizer: TextTokenizer, files: dict[str, dict]) -> None:
    """Writes the new folder `out`, whole or not at all. UserError where that cannot be."""
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2))
        (partial / "tokenizer.json").write_text(tokenizer.json)
        save_file(arrays, partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def arrays_of(params: dict) -> Arrays:
    """The parameters by their dotted names."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def stored_arrays(folder: Path) -> dict[str, Any]:
    """The arrays in a folder's files, by name, not yet read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"--init_from={folder}: no *.safetensors there")
    try:
        opened = [safe_open(path, "numpy") for path in files]
        return {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors' own, of a file that is not whole
        raise UserError(f"--init_from={folder} cannot be read: {error}") from error
