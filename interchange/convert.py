"""Make a run of a network in another program's format: python -m interchange.convert --source=FOLDER --out=runs/NAME.

The source is a folder, or a repository of the Hugging Face hub (`--source=hf:OWNER/NAME`): an export, a nanochat in
transformers' format, or nanochat's own checkpoints (model_NNNNNN.pt, of which the newest is taken). The run has one
checkpoint, with zeros as the optimizer's moments, so every command that takes a run takes it: train.py and reinforce.py
with `--init_from`, evaluate.py, sample.py, chat.py, export.py.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FilePath,
    MatricesConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    with_options,
)
from options.validation import resolved, validate
from system.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Make a run of a network in another program's format."""

    source: FilePath
    """Folder of the network, or `hf:OWNER/NAME[@REVISION]` on the Hugging Face hub."""
    out: FilePath
    """The run's folder, a new one."""
    tokenizer: FilePath = ""
    """The network's tokenizer, if the source has none: a tokenizer.json, a tokenizer.pkl, or a folder with one."""
    chat: bool = False
    """The network was trained on conversations. A chat template, and nanochat's meta files, say so themselves."""
    nanochat_cap: Literal["e85db6b", "aba30cb"] | None = None
    """Commit of nanochat that trained the network, where its arrays do not tell: `e85db6b` (from 2026-01-16 on, logits
    capped at 15) or `aba30cb` (from 2026-03-02 on, at 20)."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from data.tokenizer import TextTokenizer
from data.tokenizer_formats import find_tokenizer
from hosts.runtime import run_command, start_jax
from interchange import formats, nanochat
from interchange.hub import download
from interchange.nanochat import StoredTensor
from model.gpt import parameter_counts, parameter_shapes
from run.config_json import write_config_json
from run.folder import RunFolder
from run.saver import Saver
from training.build import build
from training.optimizer import path_name
from training.sharded import split_model
from training.state import TrainState

ARCHITECTURES = ("nanochat", "tokensum")
"""Those that our network computes, as config.json names them."""
TOKENS_PER_DEVICE = 2**14
"""Tokens of a micro-batch on one device."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if os.path.exists(out):
        raise UserError(f"--out={out} exists already; give a new folder")
    source = download(arguments.source) if arguments.source.startswith("hf:") else Path(arguments.source)
    if not nanochat.newest_checkpoint(source) and not any(source.glob("*.safetensors")):
        raise UserError(f"{source} holds no network: no *.safetensors or model_*.pt; a run needs no conversion")
    home = arguments.tokenizer or tokenizer_in(source)
    if not home:
        raise UserError(f"{source} has no tokenizer: give one as --tokenizer")
    tokenizer = find_tokenizer(home)
    start_jax()
    step, config, params = read_network(source, arguments.nanochat_cap)
    if arguments.chat:
        config = with_options(config, {"data.packing": "whole"})
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer in {home} has {tokenizer.vocab_size:,} tokens, and the network {config.model.vocab_size:,}"
        )
    write_run(out, config, step, tokenizer, params)
    size = sum(parameter_counts(config.model).values())
    use = "chat.py" if config.data.packing == "whole" else "sample.py"
    print(
        f"{size:,} parameters of {arguments.source} are the run {out}, step {step}\n"
        f"use it:        python {use} --run_dir={out}\n"
        f"train from it: python train.py --config=FILE --init_from={out}\n"
        f"evaluate it:   python evaluate.py --run_dir={out} --source=PATH"
    )
    return 0


def tokenizer_in(folder: Path) -> Path | None:
    """Return the folder with a network's tokenizer, or None if it has none."""
    if nanochat.newest_checkpoint(folder):
        return nanochat.nanochat_tokenizer(folder)
    return folder if (folder / "tokenizer.json").exists() else None


def read_network(source: Path, cap: str | None = None) -> tuple[int, Config, dict]:
    """Return the step of the network in a folder, 1 if it is not known, the Config of its run, and its float32
    parameters. `cap`: as `generation_of` takes it. Raise UserError if it is not one of ours, or if an array is missing,
    too much, or of another shape."""
    checkpoint = nanochat.newest_checkpoint(source)
    if checkpoint:
        config, stored = of_checkpoint(checkpoint, cap)
        step = int(checkpoint.stem.removeprefix("model_"))
    else:
        config, stored = of_hf(source), formats.stored_arrays(source)
        step = 1
    name_of, transposed = formats.spelling(stored)
    here, wanted = {name: tuple(array.get_shape()) for name, array in stored.items()}, {}
    for name, shape in parameter_shapes(config.model).items():
        wanted[name_of(name)] = shape[::-1] if transposed and name.endswith(".kernel") else shape
    wrong = [
        f"{name}: {here.get(name, 'missing')}, not {wanted.get(name, 'there')}"
        for name in sorted(wanted.keys() | here.keys())
        if wanted.get(name) != here.get(name)
    ]
    if wrong:
        raise UserError(f"the arrays in {source} are not those of its config:\n  " + "\n  ".join(wrong))

    def read(path: tuple, _: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        array = stored[name_of(name)][:]
        return jnp.asarray(formats.turned(name, array) if transposed else array, np.float32)

    params = jax.tree_util.tree_map_with_path(read, split_model(config.model, jnp.dtype(jnp.float32))[1])
    return max(step, 1), config, params


def batch_of_rows(length: int, tokens_per_step: int) -> BatchConfig:
    """Return the sizes of a step of rows of `length` tokens."""
    rows = max(tokens_per_step // length, 1)
    return BatchConfig(length, rows * length, math.gcd(rows, max(1, TOKENS_PER_DEVICE // length)))


def of_checkpoint(checkpoint: Path, cap: str | None) -> tuple[Config, dict[str, StoredTensor]]:
    """Return a Config with the network, the row and the rates of a checkpoint of nanochat's, and its arrays by its
    names. Raise UserError if it cannot be read, or if its network is none of ours."""
    tensors = nanochat.read_tensors(checkpoint)
    generation = nanochat.generation_of({name: tuple(tensor.shape) for name, tensor in tensors.items()}, cap)
    try:
        meta = json.loads(nanochat.meta_file(checkpoint).read_text())
        model, length = nanochat.describe_network(meta, generation)
        tokens_per_step, chat, optimizer = nanochat.describe_training(meta)
        config = as_config(model, batch_of_rows(length, tokens_per_step), chat)
        config = resolved(with_options(config, optimizer))
        validate(config)
    except (UserError, OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the meta file of {checkpoint} describes no network of ours: {error!r}") from error
    tensors = nanochat.without_spare_rows(tensors, model.vocab_size)
    if generation == "9a88194":
        tensors = nanochat.with_gates(tensors, model.kv_heads, model.value_gate_channels)
    return config, {name: StoredTensor(tensor) for name, tensor in tensors.items()}


def of_hf(folder: Path) -> Config:
    """Return a Config with the network and the row that a folder's config.json describes. Raise UserError for other
    architectures."""
    path = folder / "config.json"
    try:
        theirs: dict[str, Any] = json.loads(path.read_text())
        kind = theirs.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{folder} has a network of the architecture {kind}, not one of ours ({', '.join(ARCHITECTURES)}); "
            f"lm-evaluation-harness measures it by itself: lm_eval --model hf --model_args pretrained={folder}"
        )
    try:
        if kind == "nanochat":
            model, describe = formats.model_of_hf(theirs), formats.hf_config
        else:
            options = theirs["options"]
            model = ModelConfig(**options | {"vocab_size": theirs.get("vocab_size", options["vocab_size"])})
            describe = formats.own_config
        chat = any(folder.glob("*chat_template*"))
        config = as_config(model, batch_of_rows(theirs["max_position_embeddings"], BatchConfig.tokens_per_step), chat)
        validate(config := resolved(config))
        for name, ours in describe(config).items():
            if name not in ("architectures", "auto_map", "options") and theirs.get(name) not in (None, ours):
                raise UserError(f"{name} is {theirs[name]}, and our network has {ours}")
    except (UserError, LookupError, TypeError) as error:
        raise UserError(f"{path} describes another network than ours: {error}") from error
    return config


def as_config(model: ModelConfig, batch: BatchConfig, chat: bool) -> Config:
    """Return the Config of a run of this network, which configs/chat.py follows. `chat`: it was trained on
    conversations."""
    optimizer = OptimizerConfig(matrices=MatricesConfig(0.002, kind="muon"))
    data = DataConfig(packing="whole" if chat else "stream")
    return Config("converted", model=model, batch=batch, optimizer=optimizer, data=data)


def write_run(out: Path, config: Config, step: int, tokenizer: TextTokenizer, params: dict) -> None:
    """Write a run with one checkpoint of these parameters, under another name until it is complete. Raise UserError if
    it cannot be written."""
    config = replace(config, name=out.name, run_dir=str(out), steps=step)
    built = build(replace(config, mesh=MeshConfig(data=1)), jax.local_devices()[:1])
    moments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), built.abstract_state.opt_state)
    state = TrainState(jnp.int32(step), params, moments, jnp.int32(0))
    facts = {"tokens": 0, "seconds": 0.0, "losses": [], "shapes": parameter_shapes(config.model)}
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # from a conversion that was killed
        tokenizer.save(partial / "tokenizer")
        Saver(RunFolder(partial), CheckpointConfig()).save_last(step, state, facts)
        write_config_json(partial / "config.json", config, "", [])
        partial.rename(out)
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    run_command(main)
