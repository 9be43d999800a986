"""The repository's files and what they import, for tests."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.reference import repository_files

ROOT = Path(__file__).parent.parent


def python_files() -> list[str]:
    """Return the paths of the repository's Python files, from its root."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.splitlines() if (ROOT / path).is_file()]


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
    reached: set[str] = set()
    to_read = [command]
    while to_read:
        path = to_read.pop()
        if path not in reached:
            reached.add(path)
            to_read += [ours[name] for name in imports(path) if name in ours]
    return sorted(reached)


def copy_checkout(folder: Path) -> None:
    """Copy the checkout to a folder, set up with this Python."""
    for path in repository_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (folder / ".venv/installed-dev").touch()
