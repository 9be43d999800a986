"""Export a run's network for other programs: python export.py --run_dir=runs/small --format=hf --out=DIR."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import AnyPath, FilePath, Positive
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

from data.tokenizer import load_tokenizer
from hosts.runtime import run_command, start_jax
from interchange.card import card_of_run
from interchange.folders import converses, write_hf, write_safetensors
from interchange.shards import read_in_shards
from interchange.verification import require_transformers, verify_run
from run.folder import folder_to_read


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
    folder = folder_to_read(arguments.run_dir)
    config, step, shards = read_in_shards(folder, int(arguments.shard_gigabytes * 1e9), arguments.step)
    tokenizer = load_tokenizer(folder.fetched() / "tokenizer")
    if plain:
        write_safetensors(out, shards, config, tokenizer)
    else:
        card = card_of_run(folder, config, step, arguments.license, converses(config, tokenizer))
        write_hf(out, shards, config, tokenizer, arguments.dtype, card)
    print(f"step {step} of {arguments.run_dir} is in {out}")
    if arguments.verify:
        print(verify_run(out, arguments.run_dir, step, arguments.dtype))
    return 0


if __name__ == "__main__":
    run_command(main)
