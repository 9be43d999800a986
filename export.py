"""Export a run's network for other programs: python export.py --run_dir=runs/small --format=hf --out=DIR.

`--push=OWNER/NAME` puts it on the Hugging Face hub.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import AnyPath, FilePath, Positive
from system.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Write a run's network for other programs."""

    run_dir: AnyPath
    """Folder of the run whose newest checkpoint is written, here or at gs://."""
    out: FilePath = ""
    """A new folder. Only with `--push` it may be left out."""
    push: str = ""
    """Repository of the Hugging Face hub, `OWNER/NAME`, that gets `hf`'s folder. A new one is private."""
    revision: str = ""
    """Branch of that repository, a new one too; empty: main."""
    overwrite: bool = False
    """Replace the files that are there."""
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
from interchange.hub import push, require_room
from interchange.shards import read_in_shards
from interchange.verification import require_transformers, verify_run
from run.folder import folder_to_read


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    require_sense(arguments)
    if arguments.verify:
        require_transformers()
    if arguments.push:
        require_room(arguments.push, arguments.revision, arguments.overwrite)
    start_jax()
    if arguments.out:
        export(arguments, Path(arguments.out))
        return 0
    with TemporaryDirectory() as folder:
        export(arguments, Path(folder) / "export")
    return 0


def require_sense(arguments: Arguments) -> None:
    """Raise UserError unless the network has a place to go to, and each option something to do."""
    if not arguments.out and not arguments.push:
        raise UserError("give a new folder as --out, or a repository of the hub as --push=OWNER/NAME")
    if os.path.exists(arguments.out):  # unlike Path.exists, False without permission
        raise UserError(f"--out={arguments.out} exists already; give a new folder")
    if (arguments.revision or arguments.overwrite) and not arguments.push:
        raise UserError("--revision and --overwrite need --push=OWNER/NAME")
    needs_hf = arguments.verify or arguments.license or arguments.push or arguments.dtype != "float32"
    if arguments.format == "safetensors" and needs_hf:
        raise UserError(
            "--verify, --license, --push and --dtype need --format=hf; safetensors are the unchanged arrays"
        )


def export(arguments: Arguments, out: Path) -> None:
    """Write the network into the new folder `out`, compare it, and push it, as the arguments say."""
    folder = folder_to_read(arguments.run_dir)
    config, step, shards = read_in_shards(folder, int(arguments.shard_gigabytes * 1e9), arguments.step)
    tokenizer = load_tokenizer(folder.fetched() / "tokenizer")
    if arguments.format == "safetensors":
        write_safetensors(out, shards, config, tokenizer)
    else:
        card = card_of_run(folder, config, step, arguments.license, converses(config, tokenizer))
        write_hf(out, shards, config, tokenizer, arguments.dtype, card)
    if arguments.out:
        print(f"step {step} of {arguments.run_dir} is in {out}")
    if arguments.verify:
        print(verify_run(out, arguments.run_dir, step, arguments.dtype))
    if arguments.push:
        print(f"step {step} of {arguments.run_dir} is at {push(out, arguments.push, arguments.revision)}")


if __name__ == "__main__":
    run_command(main)
