"""Export a run's network for other programs: python export.py --run_dir=runs/small --format=hf --out=DIR."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import numpy as np
from jaxtyping import Int

from configs.command_line import parse_arguments
from configs.ramp import Ramp
from configs.schema import AnyPath, FilePath, MeshConfig, Positive, UserError
from data.tokenizer import load_tokenizer
from evaluation.documents import read_sources
from evaluation.network import Network, open_network
from hosts.runtime import cache_dir, run_command, start_jax
from interchange.card import model_card
from interchange.safetensors import write_safetensors
from interchange.transformers import write_hf
from interchange.verify import require_transformers, verify
from run.lines import scores
from run.record import at_hand
from run.saved_run import read_in_shards
from training.mesh import make_mesh


@dataclass(frozen=True)
class Arguments:
    """Write a run's network for other programs."""

    run_dir: AnyPath
    """Folder of the run whose newest checkpoint is written, here or at gs://."""
    out: FilePath
    """A new folder."""
    step: Positive[int] | None = None
    """The checkpoint's step; default: the newest."""
    average: bool = True
    """Take the average of the run's parameters, if it has one (`optimizer.average`). False: the last ones."""
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
    """Load the written folder in transformers, and compare its logits with the network's own on text. It needs torch
    and transformers, and memory for both networks."""


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
    folder = at_hand(arguments.run_dir)
    shard_bytes = int(arguments.shard_gigabytes * 1e9)
    config, step, shards = read_in_shards(folder, shard_bytes, arguments.step, arguments.average)
    tokenizer = load_tokenizer(folder / "tokenizer")
    if plain:
        write_safetensors(out, shards, config, tokenizer)
    else:
        bits = scores(folder) | (scores(folder, "average_val_bpb") if arguments.average else {})
        card = partial(model_card, config, step, Ramp.of(config.batch).tokens(step), bits.get(step), arguments.license)
        write_hf(out, shards, config, tokenizer, arguments.dtype, card)
    print(f"step {step} of {arguments.run_dir} is in {out}; --init_from={out} trains from it")
    if arguments.verify:
        network = open_network(folder, make_mesh(MeshConfig(data=1), jax.local_devices()[:1]), step, arguments.average)
        print(verify(out, network.params, config.model, arguments.dtype, rows_of_text(network)))
    return 0


def rows_of_text(network: Network) -> Int[np.ndarray, "rows length"]:
    """Return two rows of Python's library as the network's tokens."""
    (text,) = read_sources("stdlib", 100, "text", Path(), cache_dir())
    length = min(network.config.batch.sequence_length, 1024)
    encoded = network.tokenizer.encode([document.text for document in text.documents])
    return np.array([[network.tokenizer.bos, *ids][:length] for ids in encoded if len(ids) >= length][:2], np.int32)


if __name__ == "__main__":
    run_command(main)
