"""Show the progress of long work: a bar in a terminal, lines in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 10  # between two lines of progress without a terminal


class LineWriter:
    """Writes tqdm's output as lines of a log."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def progress(work: Iterable | None = None, **options: Any) -> tqdm:
    """Return tqdm over `work`, with tqdm's `options` (`desc`, `unit`, `total`, `disable`, ...): a bar in a terminal,
    otherwise a line every ten seconds."""
    if sys.stderr.isatty():
        return tqdm(work, **options)
    form = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt} {unit}, {remaining} left"
    times = dict.fromkeys(("mininterval", "maxinterval", "delay"), LINE_SECONDS)
    return tqdm(work, **options, **times, file=LineWriter(), bar_format=form)
