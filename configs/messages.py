"""What the person who runs a command sees: messages, and the progress of long work with the time left. Modules log
messages, and a command shows them above its progress bar."""

import logging
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

LOGGER = logging.getLogger("tokensum")
EVERY = 10  # seconds between two lines of progress without a terminal


class AboveTheBar(logging.Handler):
    """Writes messages to the standard output without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))
        sys.stdout.flush()  # a file or a pipe is otherwise written late


def show_messages(first: bool = True) -> None:
    """Show the messages of a command's first process, and none of its others."""
    LOGGER.handlers = [AboveTheBar() if first else logging.NullHandler()]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # some library gives the root logger a handler, too


class _Lines:
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
    return tqdm(work, **options, file=_Lines(), bar_format=form, mininterval=EVERY, maxinterval=EVERY, delay=EVERY)
