"""Results of an evaluation: a log with one line per item, which resumes after a kill, files, a table and pictures."""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax

from hosts.distributed import on_first_process
from system.errors import UserError
from system.files import append_whole, read_if_there, write_picture, write_whole

AT_A_TIME = 32  # lines that a kill may lose. A generated answer may take seconds


class ItemLog(list[dict]):
    """A log of lines. Every process has them; the first one writes them to the file, if there is one."""

    def __init__(self, path: Path | None = None, facts: dict[str, Any] | None = None):
        """Open the log at `path`. Its first line is the `facts` that its items depend on. It continues an earlier log.
        Raise UserError if that has other facts, or if the file cannot be read or written."""
        super().__init__(on_first_process(lambda: _open(path, facts or {})) if path else [])
        self.path = path

    def extend(self, lines: Iterable[dict]) -> None:
        """Add lines, as they come. A kill loses at most `AT_A_TIME` of them."""
        iterator = iter(lines)
        while some := list(islice(iterator, AT_A_TIME)):
            if self.path and jax.process_index() == 0:
                append_whole(self.path, to_lines(some))
            super().extend(some)


def _open(path: Path, facts: dict[str, Any]) -> list[dict]:
    """Return the lines after the facts, and drop the half line that a kill left."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        complete = read_if_there(path).split(b"\n")[:-1]  # a complete line ends in a newline
        lines = [json.loads(line) for line in dict.fromkeys(complete)]  # two commands at once wrote one twice
        lines = lines or [facts]
        before = lines[0]
        if not isinstance(before, dict):
            raise ValueError("its first line has no facts of an evaluation")
        differ = [f"{name} {before.get(name)}, now {facts[name]}" for name in facts if before.get(name) != facts[name]]
        if differ:
            raise UserError(
                f"{path} has the items of another evaluation ({'; '.join(differ)}); give --out=FOLDER for this one, or "
                "remove that file"
            )
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


def as_table(results: Mapping[str, Any], title: str = "") -> str:
    """Return a line for each figure, then a table for each group of figures, with a row for each task, source, ..."""
    single = {name: value for name, value in results.items() if not isinstance(value, Mapping)}
    if not single and all(isinstance(value, Mapping) for value in results.values()):
        columns = list(dict.fromkeys(name for row in results.values() for name in row))
        rows = [[title, *columns], *([name, *map(row.get, columns)] for name, row in results.items())]
    else:
        rows = [*([[title]] if title else []), *([name, value] for name, value in single.items())]
    cells = [[str(row[0]), *map(shown, row[1:])] for row in rows]
    widths = [max(len(row[i]) for row in cells if len(row) > i) for i in range(max(map(len, cells)))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in cells
    ]
    groups = {name: value for name, value in results.items() if isinstance(value, Mapping)} if single else {}
    return "\n".join([*lines, *("\n" + as_table(group, name) for name, group in groups.items())])


def shown(value: Any) -> str:
    """Return a figure with five digits."""
    if isinstance(value, list):
        return " to ".join(map(shown, value))
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def plot_accuracies(tasks: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw each task's accuracy with its interval, against the accuracy of guessing."""
    from matplotlib.figure import Figure  # a second to import

    labels = list(tasks)[::-1]
    accuracy = [tasks[label]["accuracy"] for label in labels]
    guessing = [tasks[label]["baseline"] for label in labels]
    below = [tasks[label]["accuracy"] - tasks[label]["interval"][0] for label in labels]
    above = [tasks[label]["interval"][1] - tasks[label]["accuracy"] for label in labels]
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(accuracy, labels, xerr=[below, above], fmt="o", capsize=3, label="accuracy, 95% interval")
    axes.plot(guessing, labels, "|", color="black", markersize=14, label="guessing")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.7, len(labels) - 0.3), xlabel="accuracy", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    write_picture(path, figure)
