"""A log of an evaluation, a JSON object a line, that goes on after a kill."""

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from configs.files import append_whole, write_whole
from configs.schema import UserError

AT_A_TIME = 512  # lines that a kill may lose


def open_log(path: Path, facts: dict[str, Any]) -> list[dict]:
    """The lines of a log that an earlier start left for the same `facts`, its first line; else it is started anew. A
    line of which a kill left half is dropped. UserError where it cannot be written."""
    lines = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for text in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:  # whole lines end in one
            lines.append(json.loads(text))
        kept = lines if lines and lines[0] == facts else [facts]
        write_whole(path, to_lines(kept))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); give --out=FOLDER") from error
    except ValueError as error:
        raise UserError(f"{path} cannot be continued ({error}); remove it to start again") from error
    return kept[1:]


def append_to_log(path: Path, lines: list[dict]) -> None:
    """Adds lines, on disk for certain."""
    append_whole(path, to_lines(lines))


def recorded(lines: Iterable[dict], record: Callable[[list[dict]], Any]) -> list[dict]:
    """All of them; `record` is given `AT_A_TIME`, as they come."""
    coming, kept = iter(lines), []
    while some := list(islice(coming, AT_A_TIME)):
        record(some)
        kept += some
    return kept


def to_lines(values: Sequence[dict]) -> str:
    """A JSON object a line."""
    return "".join(json.dumps(value) + "\n" for value in values)
