"""Compare an exported network, loaded by transformers, with the run's own."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from evaluation.texts import read_documents
from hosts.runtime import cache_dir
from model.loss import softcap
from options.schema import MeshConfig, ModelConfig
from run.network import Network, open_network
from system.errors import UserError
from training.mesh import make_mesh
from training.sharded import split_model

BOUND = 1e-3  # of logits in float32: ten times the observed effect of the order of sums
DRAWN = 16  # tokens that transformers draws for each row


def require_transformers() -> None:
    """Raise UserError if torch or transformers is not installed."""
    if missing := [name for name in ("torch", "transformers") if not find_spec(name)]:
        raise UserError(f"--verify loads the network in transformers: pip install {' '.join(missing)}")


def verify_run(folder: Path, run_dir: str, step: int, dtype: str) -> str:
    """Compare the network in `folder` with that of a run's checkpoint, as `verify` does."""
    network = open_network(run_dir, make_mesh(MeshConfig(data=1), jax.local_devices()[:1]), step)
    return verify(folder, network.params, network.config.model, dtype, rows_of_text(network))


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


def rows_of_text(network: Network) -> Int[np.ndarray, "rows length"]:
    """Return two rows of Python's library as the network's tokens."""
    documents, _ = read_documents("stdlib", 100, "text", cache_dir())
    length = min(network.config.batch.sequence_length, 1024)
    encoded = network.tokenizer.encode([document.text for document in documents])
    return np.array([[network.tokenizer.bos, *ids][:length] for ids in encoded if len(ids) >= length][:2], np.int32)
