"""Print how large the repository is: make house. tests/test_house.py bounds these figures.

The closure of a command is every module of ours that it imports, imports inside functions included.
"""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config, Role, hints

ROOT = Path(__file__).parent.parent


def python_files() -> list[str]:
    """Return the paths of the repository's Python files, from its root."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]


def lines(paths: list[str]) -> int:
    """Return the number of lines in these files."""
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def imports(path: str) -> Iterator[str]:
    """Yield the dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def closure(command: str) -> list[str]:
    """Return the files of ours that the file `command` imports, directly or not, itself included."""
    ours = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in python_files()}
    reached, todo = set(), [command]
    while todo:
        if (path := todo.pop()) not in reached:
            reached.add(path)
            todo += [ours[name] for name in imports(path) if name in ours]
    return sorted(path for path in reached if lines([path]))  # an empty __init__.py is no module to read


def options() -> int:
    """Return the number of a run's options on the command line. A config file has more, of type `InFile`."""
    return sum(Role.FILE not in getattr(kind, "__metadata__", ()) for kind in hints(Config).values())


def counts() -> dict[str, int]:
    """Return the counts that tests/test_house.py bounds."""
    files, reached = python_files(), closure("train.py")
    tests = [path for path in files if path.startswith("tests/")]
    body = ast.parse((ROOT / "train.py").read_text()).body
    return {
        "lines outside tests": lines(files) - lines(tests),
        "lines of tests": lines(tests),
        "lines of train.py": lines(["train.py"]),
        "names that train.py imports": sum(
            len(node.names) for node in body if isinstance(node, ast.Import | ast.ImportFrom)
        ),
        "modules that train.py needs": len(reached),
        "lines that train.py needs": lines(reached),
        "options on the command line": options(),
    }


if __name__ == "__main__":
    for what, count in counts().items():
        print(f"{count:7,}  {what}")
