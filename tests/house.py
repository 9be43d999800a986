"""Print how large the repository is, and fail if a count is above its bound, if train.py needs a tool, or if another
class of the core is large: make house.

The closure of a command is every module of ours that it imports, imports inside functions included. What only
`--eval.tasks` loads, by name, is not counted for train.py: ten modules with 1,390 lines.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config, Role, hints

ROOT = Path(__file__).parent.parent
BOUNDS = {
    "lines outside tests": 19_044,
    "lines of tests": 13_960,
    "lines of train.py": 153,
    "names that train.py imports": 29,
    "modules that train.py needs": 49,
    "lines that train.py needs": 9_362,
    "options on the command line": 70,
}
NOT_FOR_TRAIN = ("tools/", "serving/", "bench/", "tests/", "data/prepare/")
LARGE = {"Attention", "Build", "Config", "DataConfig", "GPT", "MetricsLog", "ModelConfig", "OptimizerConfig"}
LARGE |= {"Text"}
"""Classes of the core with more than eight attributes, or six arguments of a constructor that is written out: options,
the network's parameters, and what one function makes from one config."""


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
    """Return the counts of BOUNDS."""
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


def large_classes() -> set[str]:
    """Return the classes that train.py needs and that have more than eight attributes or six arguments."""
    large, own = set(), lambda node: isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    nodes = [node for path in closure("train.py") for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    for kind in (node for node in nodes if isinstance(node, ast.ClassDef)):
        names = {node.attr for node in ast.walk(kind) if own(node) and isinstance(node.ctx, ast.Store)}
        names |= {node.target.id for node in kind.body if isinstance(node, ast.AnnAssign)}
        made = [node.args for node in kind.body if getattr(node, "name", "") == "__init__"]
        if len(names) > 8 or any(len([*it.args, *it.kwonlyargs]) > 1 + 6 for it in made):
            large.add(kind.name)
    return large


def main() -> int:
    """Print all counts and problems. Return 1 if there are problems."""
    problems = [f"train.py needs {path}" for path in closure("train.py") if path.startswith(NOT_FOR_TRAIN)]
    problems += [f"{name} is large: see LARGE in tests/house.py" for name in sorted(large_classes() - LARGE)]
    for what, count in counts().items():
        print(f"{count:7,} of {BOUNDS[what]:7,}  {what}")
        if count > BOUNDS[what]:
            problems.append(f"too many {what}: delete something, or argue for a higher bound")
    print("\n".join(problems), end="\n" * bool(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
