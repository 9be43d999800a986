"""Prepare raw text as a dataset folder: python -m data.prepare --source=PATH --out=DIR. The same command resumes it.

docs/data.md describes the folder. During preparation it also has `lock`, and `parts/`: encoded documents. Run the
command in the repository's root, like every command. Folders may be anywhere.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from data.prepare.corpus import GREETING
from data.prepare.preparation import Preparation, prepare
from data.prepare.record import read_dataset_json
from options.command_line import parse_arguments
from options.schema import FilePath, NotNegative, Positive
from system.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arguments(Preparation):
    """Prepare raw text as a dataset folder."""

    out: FilePath
    """The dataset's folder."""
    max_files: Positive[int] | None = None
    """Use only this many of the source's files. The same command with more resumes, with the first one's tokenizer."""
    workers: NotNegative[int] = 0
    """Processes; 0: one per core. Each takes up to 1.5 GB of memory. The dataset's bytes do not depend on them."""


def main() -> int:
    for name in ("--source", "--exclude"):
        if sum(word.partition("=")[0] == name for word in sys.argv) > 1:
            raise UserError(f"{name} is given twice; give several after one: {name} A B")
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if arguments.tokenizer and arguments.vocab_size != Preparation.vocab_size:
        raise UserError("--vocab_size is for a tokenizer that is trained here: leave it or --tokenizer out")
    settings = Preparation(**{name: getattr(arguments, name) for name in Preparation.__dataclass_fields__})
    prepare(settings, out, arguments.max_files, arguments.workers)
    facts = read_dataset_json(out)
    skipped = sum(count for reason, count in facts["skipped"].items() if reason != GREETING)
    print(json.dumps({"out": str(out), "train": facts["train"], "val": facts["val"], "skipped": skipped}))
    return 0


if __name__ == "__main__":
    from hosts.runtime import run_command

    run_command(main)
