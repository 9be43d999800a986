"""The files of an evaluation: a log with one line per item, which resumes after a kill, and the results."""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from configs.files import append_whole, write_whole
from configs.schema import UserError
from hosts.runtime import on_first_process

AT_A_TIME = 32  # lines that a kill may lose. A generated answer may take seconds


class ItemLog:
    """A log of lines. Every process has them; the first one writes them to the file, if there is one."""

    def __init__(self, path: Path | None = None, facts: dict[str, Any] | None = None):
        """Open the log at `path`. Its first line is the `facts` that its items depend on. The lines of an earlier start
        are kept if its facts are the same. Raise UserError if the file cannot be read or written."""
        self.path = path
        self.lines: list[dict] = on_first_process(lambda: _open(path, facts or {})) if path else []

    def extend(self, lines: Iterable[dict]) -> None:
        """Add lines, as they come. A kill loses at most `AT_A_TIME` of them."""
        iterator = iter(lines)
        while some := list(islice(iterator, AT_A_TIME)):
            if self.path and jax.process_index() == 0:
                append_whole(self.path, to_lines(some))
            self.lines += some


def _open(path: Path, facts: dict[str, Any]) -> list[dict]:
    """Return the lines after the facts, and drop the half line that a kill left."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # a complete line ends in a newline
        lines = [json.loads(line) for line in complete]
        lines = lines if lines and lines[0] == facts else [facts]
        write_whole(path, to_lines(lines))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give --out=FOLDER") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be continued ({error}); remove it to start again") from error
    return lines[1:]


def to_lines(values: Iterable[dict]) -> str:
    """Return one JSON object per line."""
    return "".join(json.dumps(value) + "\n" for value in values)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write results for people and programs."""
    write_whole(path, json.dumps(content, indent=2) + "\n")
