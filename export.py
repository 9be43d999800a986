"""Export a run's network for other programs: python export.py --run_dir=runs/small --format=hf --out=DIR."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from configs.command_line import parse_arguments, refuse_mistakes
from configs.schema import AnyPath, Config, FilePath, MeshConfig, ModelConfig, Positive
from system.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Write a run's network for other programs."""

    run_dir: AnyPath
    """Folder of the run whose newest checkpoint is written, here or at gs://."""
    out: FilePath
    """A new folder."""
    step: Positive[int] | None = None
    """The checkpoint's step; default: the newest."""
    format: Literal["hf", "safetensors"] = "hf"
    """`hf`: a folder for transformers' AutoModelForCausalLM and AutoTokenizer, as NanoChatForCausalLM. If that class
    lacks an option of the network, the folder has its own code (trust_remote_code=True). `safetensors`: the arrays
    under their own names, with the config and the tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of `hf`'s arrays."""
    shard_gigabytes: Positive[float] = 2.0
    """Size of a file in GB: float32 arrays of this size are read and written at a time."""
    license: str = ""
    """License of the weights, as Hugging Face names it (`apache-2.0`), for the model card of `hf`."""
    verify: bool = False
    """Load the written folder in transformers, and compare its logits with the network's own: in one pass over text,
    and while it continues padded rows with its cache. It needs torch and transformers, and memory for both networks."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jaxtyping import Int

from data.dataset import join_source, split_source
from data.tokenizer import load_tokenizer
from evaluation.texts import read_documents
from hosts.runtime import cache_dir, run_command, start_jax
from interchange.folders import beyond_hf, converses, write_hf, write_safetensors
from model.gpt import kinds
from model.loss import softcap
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import RunFolder
from run.network import Network, open_network
from run.record import batch_of
from training.mesh import make_mesh
from training.optimizer import path_name
from training.sharded import shard_network, split_model

BOUND = 1e-3  # of logits in float32: ten times the observed effect of the order of sums
DRAWN = 16  # tokens that --verify lets transformers draw for each row
LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER{trust})
tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
text = tokenizer({prompt!r}, return_tensors="pt")  # with the token that starts a document
print(tokenizer.decode(model.generate(**text, max_new_tokens=50)[0]))
```"""
CHAT = """```python
from transformers import pipeline

chat = pipeline("text-generation", model=FOLDER{trust})
messages = [{{"role": "user", "content": {prompt!r}}}]
print(chat(messages, max_new_tokens=200)[0]["generated_text"][-1]["content"])
```

The template writes the token that starts a document; the tokenizer writes it before every other text. Encode a
conversation that the template rendered with `add_special_tokens=False`, or it starts with two of them.

The mask of `return_assistant_tokens_mask=True` is empty with this template. For training, `chat_template="training"`
gives the same tokens and the mask of what the assistant wrote."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if os.path.exists(out):  # unlike Path.exists, False without permission
        raise UserError(f"--out={out} exists already; give a new folder")
    plain = arguments.format == "safetensors"
    if plain and (arguments.verify or arguments.license or arguments.dtype != "float32"):
        raise UserError("--verify, --license and --dtype need --format=hf; safetensors are the unchanged arrays")
    if arguments.verify:
        require_transformers()
    start_jax()
    shard_bytes = int(arguments.shard_gigabytes * 1e9)
    folder = RunFolder(arguments.run_dir)
    config, step, shards = read_in_shards(folder, shard_bytes, arguments.step)
    tokenizer = load_tokenizer(folder.fetched() / "tokenizer")
    if plain:
        write_safetensors(out, shards, config, tokenizer)
    else:
        bits = folder.figures()
        tokens, _ = batch_of(folder.events.read(), step, config.batch.tokens_per_step)
        if not config_of_run(folder)[0]["dataset"]:  # it was converted
            tokens = None
        card = model_card(config, step, tokens, bits.get(step), arguments.license, converses(config, tokenizer))
        write_hf(out, shards, config, tokenizer, arguments.dtype, card)
    print(f"step {step} of {arguments.run_dir} is in {out}")
    if arguments.verify:
        network = open_network(arguments.run_dir, make_mesh(MeshConfig(data=1), jax.local_devices()[:1]), step)
        print(verify(out, network.params, config.model, arguments.dtype, rows_of_text(network)))
    return 0


def read_in_shards(
    folder: RunFolder, max_bytes: int, step: int | None = None
) -> tuple[Config, int, Iterator[dict[str, np.ndarray]]]:
    """Return a run's Config, a checkpoint's step (`step`, or the newest), and its float32 parameters by their dotted
    names: at most `max_bytes` at a time, or one that is larger, so a network larger than the memory can be read."""
    _, config = config_of_run(folder)
    checkpoints = Checkpoints(folder)
    step = checkpoints.asked(step)
    mesh = make_mesh(MeshConfig(data=1), jax.local_devices()[:1])
    abstract = shard_network(config.model, jnp.dtype("float32"), mesh).abstract_params()
    shards: list[dict[tuple, Any]] = [{}]
    size = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        nbytes = leaf.size * leaf.dtype.itemsize
        if shards[-1] and size + nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][tuple(part.key for part in path)] = leaf
        size += nbytes

    def read(shard: dict[tuple, Any]) -> dict[str, np.ndarray]:
        params, _ = checkpoints.restore_params(unflatten_dict(shard), step)
        return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    return config, step, map(read, shards)


def model_card(config: Config, step: int, tokens: int | None, val_bpb: float | None, license: str, chat: bool) -> str:
    """Return the model card of a network after `step` steps on `tokens` tokens; None: its text is not known. `chat`: it
    was trained on conversations. `license`: Hugging Face's name; empty: not stated."""
    model, parameters = config.model, sum(p.size * count for p, count in kinds(config.model))
    bits = "not measured at this step" if val_bpb is None else f"{val_bpb:.4f} of held-out text"
    rows = {
        "parameters": f"{parameters:,} ({model.depth} blocks of width {model.width}, {model.vocab_size:,} tokens)",
        "row": f"{config.batch.sequence_length:,} tokens",
        "training text": "not known" if tokens is None else text_name(config.data.source),
        "trained on": "not known" if tokens is None else f"{tokens:,} tokens, {step:,} steps",
        "bits per byte": bits,
        "license": license or "not stated: ask whoever trained it, and see the training text's",
    }
    header = f"---\n{f'license: {license}' + chr(10) if license else ''}library_name: transformers\n---\n\n"
    if chat:
        about, load = "answers the user of a conversation. It was fine-tuned on conversations.", CHAT
    else:
        about, load = "continues text. It was pretrained and follows no instructions.", LOAD
    question = "What does sorted() do?" if config.data.source == "chat-stdlib" else "Hello!"
    prompt = next(filter(None, config.eval.prompts), question if chat else "")
    code = load.format(prompt=prompt, trust=", trust_remote_code=True" if beyond_hf(model) else "")
    facts = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())])
    about = f"# {config.name}\n\nA language model that {about}"
    return "\n\n".join([header + about, facts, code, requirements(model)]) + "\n"


def text_name(source: str) -> str:
    """Return `data.source` for readers elsewhere: of a path on this machine, only the last name."""
    short = lambda name: name if "://" in name or name.startswith("hf:") else Path(name).name or "a folder"
    return join_source([(share, short(name)) for share, name in split_source(source)])


def requirements(model: ModelConfig) -> str:
    """Return what a user needs to run a network. docs/chat.md has the versions that were tried."""
    if lacking := ", ".join(beyond_hf(model)):
        return (
            "It needs torch and transformers 4.57.6 or later, which run the code in this folder "
            f"(`trust_remote_code=True`). vLLM, llama.cpp and mlx-lm lack {lacking}."
        )
    return "It needs torch and transformers 5.0 or later (NanoChatForCausalLM). llama.cpp lacks this architecture."


def require_transformers() -> None:
    """Raise UserError if torch or transformers is not installed."""
    if missing := [name for name in ("torch", "transformers") if not find_spec(name)]:
        raise UserError(f"--verify loads the network in transformers: pip install {' '.join(missing)}")


def largest_difference(
    folder: Path, params: dict, model: ModelConfig, tokens: Int[np.ndarray, "rows length"]
) -> tuple[float, float]:
    """Return the largest difference between the capped logits of the network in `folder`, loaded by transformers, and
    of ours in one pass, both in float32; and the standard deviation of ours, for comparison. transformers computes
    them in one pass over `tokens`, and by `generate()` with its cache. `params`: rounded like the folder's."""
    import torch
    from transformers import AutoModelForCausalLM

    graphdef, _ = split_model(model, jnp.dtype("float32"))
    logits = jax.jit(lambda params, tokens: softcap(nnx.merge(graphdef, params)(tokens)[0], model.softcap))
    ours = np.asarray(logits(params, tokens))
    network = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    with torch.no_grad():
        theirs = network(torch.tensor(tokens)).logits.numpy()
    sequences, padding, cached = continue_padded(network, tokens)
    single = np.asarray(logits(params, sequences))
    last = sequences.shape[1] - cached.shape[1] - padding - 1  # the prompts' last positions
    expected = np.stack([row[start:][: cached.shape[1]] for row, start in zip(single, last)])
    difference = max(np.max(np.abs(ours - theirs)), np.max(np.abs(expected - cached)))
    return float(difference), float(np.std(ours))


def continue_padded(
    network: Any, tokens: Int[np.ndarray, "rows length"]
) -> tuple[Int[np.ndarray, "rows length"], Int[np.ndarray, " rows"], np.ndarray]:
    """Let transformers continue the beginnings of rows as it does by default: greedily here, with its cache, as a batch
    that is padded on the left. Return the rows with their padding moved to the end, where no token sees it; the padding
    of each; and the logits of the drawn tokens [rows, drawn, vocab_size]."""
    import torch

    rows, length = tokens.shape
    drawn = min(DRAWN, length // 2)
    padding = np.arange(rows) % (length - drawn)
    prompts = np.stack([np.roll(row[: length - drawn], pads) for row, pads in zip(tokens, padding)])
    mask = np.arange(length - drawn) >= padding[:, None]
    output = network.generate(
        torch.tensor(prompts),
        attention_mask=torch.tensor(mask, dtype=torch.long),
        do_sample=False,
        min_new_tokens=drawn,
        max_new_tokens=drawn,
        return_dict_in_generate=True,
        output_logits=True,
    )
    moved = [np.roll(row, -pads) for row, pads in zip(output.sequences.numpy(), padding)]
    return np.stack(moved).astype(np.int32), padding, torch.stack(output.logits, dim=1).numpy()


def verify(folder: Path, params: dict, model: ModelConfig, dtype: str, tokens: np.ndarray) -> str:
    """Return a line on the difference between the logits of the network in `folder` and ours on `tokens`. Above the
    bound, remove the folder and raise RuntimeError."""
    rounded = jax.tree.map(lambda leaf: leaf.astype(np.dtype(dtype)).astype(np.float32), params)
    difference, size = largest_difference(folder, rounded, model, tokens)
    result = (
        f"logits of {tokens.size} tokens of Python's library, and of their continuation with transformers' cache, "
        f"differ by at most {difference:.2g} (spread {size:.2g})"
    )
    if not difference <= BOUND:  # nan included
        shutil.rmtree(folder)
        raise RuntimeError(f"{result}: above {BOUND}, so {folder} was removed: this is a defect of the export")
    return result


def rows_of_text(network: Network) -> Int[np.ndarray, "rows length"]:
    """Return two rows of Python's library as the network's tokens."""
    documents, _ = read_documents("stdlib", 100, "text", cache_dir())
    length = min(network.config.batch.sequence_length, 1024)
    encoded = network.tokenizer.encode([document.text for document in documents])
    return np.array([[network.tokenizer.bos, *ids][:length] for ids in encoded if len(ids) >= length][:2], np.int32)


if __name__ == "__main__":
    run_command(main)
