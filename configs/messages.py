"""Show messages, and start the user's command at events of a run (--log.on_event).

Modules log messages, which appear above the progress bar."""

import io
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from configs.schema import Config

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


def start_hook(config: Config, event: str, message: str, step: int | None, log: Path, wait: float) -> None:
    """Start the command with TOKENSUM_EVENT, TOKENSUM_MESSAGE, TOKENSUM_STEP, TOKENSUM_RUN and TOKENSUM_RUN_DIR in its
    environment, and append its output to `log`. Wait for it, `wait` seconds at most. A failure is printed and changes
    nothing."""
    if not config.log.on_event:
        return
    run_dir = config.run_dir if "://" in config.run_dir else os.path.abspath(config.run_dir)
    facts = {"EVENT": event, "MESSAGE": message, "STEP": "" if step is None else str(step)}
    facts |= {"RUN": config.name, "RUN_DIR": run_dir}
    environment = os.environ | {f"TOKENSUM_{key}": value.replace("\0", "") for key, value in facts.items()}
    try:
        with log.open("ab") as file:
            started = subprocess.Popen(
                config.log.on_event,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a Ctrl-C that ends the run must not reach it
            )
    except (OSError, ValueError) as error:
        print(f"--log.on_event was not started: {error}", file=sys.stderr)
        return
    threading.Thread(target=started.wait, daemon=True).start()  # otherwise it would stay as a zombie
    with suppress(subprocess.TimeoutExpired):
        started.wait(wait)
