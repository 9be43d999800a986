"""Results of an evaluation as text for people. `--json` gives programs the same."""

from collections.abc import Mapping
from typing import Any


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
