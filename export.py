"""A run's network for other programs: python export.py --run_dir=runs/small --format=hf --out=DIR."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.command_line import parse_arguments
from configs.schema import FilePath, MeshConfig, UserError
from data.tokenizer import load_tokenizer
from interchange.safetensors import write_safetensors
from interchange.transformers import write_hf
from run.folder import load_run
from run.runtime import run_command, start_jax
from training.mesh import make_mesh


@dataclass(frozen=True)
class Arguments:
    """Write a run's newest network for other programs."""

    run_dir: FilePath
    """Folder of the run whose newest checkpoint is written."""
    out: FilePath
    """A new folder."""
    format: Literal["hf", "safetensors"] = "hf"
    """`hf`: what transformers' AutoModelForCausalLM and AutoTokenizer load, as NanoChatForCausalLM. `safetensors`: the
    arrays under their own names, with the config and the tokenizer; networks with every option."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if os.path.exists(out):  # unlike Path.exists, False where it may not look
        raise UserError(f"--out={out} is there already; give a new folder")
    start_jax()
    run = load_run(arguments.run_dir, make_mesh(MeshConfig()))
    tokenizer = load_tokenizer(Path(arguments.run_dir) / "tokenizer")
    write = write_hf if arguments.format == "hf" else write_safetensors
    write(out, run.params, run.config, tokenizer)
    print(f"step {run.step} of {arguments.run_dir} is in {out}; train on from it with --init_from={out}")
    return 0


if __name__ == "__main__":
    run_command(main)
