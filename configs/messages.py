"""Messages to the person who runs a command. Modules log them, and a command shows them above its progress bar."""

import logging
import sys

from tqdm import tqdm

LOGGER = logging.getLogger("tokensum")


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
