"""Show messages, which modules log, above the progress bar."""

import io
import logging
import os
import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

LOGGER = logging.getLogger("tokensum")


class TqdmHandler(logging.Handler):
    """Writes messages to the standard output without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))
        sys.stdout.flush()  # a file or a pipe is otherwise written late


class LossyWriter(io.FileIO):
    """A file that drops what its disk or its reader does not take."""

    def write(self, content: Any) -> int:
        """Return the number of bytes."""
        with suppress(OSError):
            return super().write(content)
        return len(content)


def ignore_output_errors(*names: str) -> None:
    """Let `stdout` or `stderr`, if they are a log, drop messages while its disk is full, or once its reader has ended,
    as `tee` does at a Ctrl-C. An error there would end the run or its watchdog, or replace its exit code."""
    for name in names:
        if (file := getattr(sys, name)) and file is getattr(sys, f"__{name}__"):
            ways = {"line_buffering": file.line_buffering, "write_through": file.write_through}
            raw: Any = LossyWriter(file.fileno(), "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, file.encoding, file.errors, **ways))


def repair_streams() -> None:
    """Let the output escape characters that its encoding lacks, and open /dev/null for what the caller has closed
    (`>&-`), for which Python has None. Errors there would end a command after its work."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def show_messages(first: bool = True) -> None:
    """Show the messages of a command's first process, and none of its others."""
    LOGGER.handlers = [TqdmHandler() if first else logging.NullHandler()]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # some library gives the root logger a handler, too
