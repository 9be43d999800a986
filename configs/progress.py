"""The progress of long work, with the time left: a bar in a terminal, otherwise a line every ten seconds."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

EVERY = 10  # seconds between two lines


class _Lines:
    """Writes tqdm's output as lines of a log."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress(work: Iterable | None = None, **options: Any) -> tqdm:
    """Return tqdm over `work`, with tqdm's `options` (`desc`, `unit`, `total`, `disable`, ...)."""
    if sys.stderr.isatty():
        return tqdm(work, **options)
    form = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} {unit}, {remaining} left"
    return tqdm(work, **options, file=_Lines(), bar_format=form, mininterval=EVERY, maxinterval=EVERY, delay=EVERY)
