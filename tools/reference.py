"""Write build/docs, from which `make docs` builds the site: python -m tools.reference.

It has the repository's files at their own paths, so that links between them work. docs/reference/options.md has every
option of a run, made of the dataclasses and docstrings that `--help` prints.
"""

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import indent
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from docstring_parser import parse_from_object

from options.schema import Config, Role, hints

INTRO = """
A config file gives the options of a run, and the command line changes them: `--model.depth=20`. The defaults here are
those of `options/schema.py`; `python train.py --config=FILE --help` prints those of a file. A run that resumes refuses
another value, except for options marked *may change on resume*, or with `--accept_changes`.
"""
KINDS = {str: "text", int: "integer", float: "number", bool: "`True` or `False`"}
BOUNDS = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ ", "multiple_of": "multiple of "}


def values(hint: Any) -> str:
    """Return which values an option of this type takes: `integer > 0`, or its choices."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {values(get_args(kind)[0])}"
    if get_args(kind):
        return " or ".join(values(one) for one in get_args(kind) if one is not NoneType)
    limits = [(sign, getattr(extra, name, None)) for extra in extras for name, sign in BOUNDS.items()]
    return f"{KINDS[kind]} {' and '.join(f'{sign}{limit}' for sign, limit in limits if limit is not None)}".strip()


def linked(text: str | None) -> str:
    """Return a docstring as Markdown: with links to pages and papers."""
    text = re.sub(r"\bdocs/[\w-]+\.md", r"[\g<0>](../../\g<0>)", inspect.cleandoc(text or ""))
    return re.sub(r"arXiv:([\d.]+\d)", r"[\g<0>](https://arxiv.org/abs/\1)", text)


def option(name: str, hint: Any, default: Any, text: str | None) -> str:
    """Return the entry of an option: its name, the values it takes, its default (MISSING: none), and its text."""
    extras = getattr(hint, "__metadata__", ())
    word = name if Role.FILE in extras else f"--{name}"
    typed = "" if default is None else " ".join(default) if isinstance(default, tuple) else str(default)
    facts = [values(hint), "required" if default is MISSING else f"default `{typed}`" if typed.strip() else ""]
    facts += ["may change on resume" * (Role.FREE in extras), "in a config file only" * (Role.FILE in extras)]
    return f"`{word}` · {'; '.join(filter(None, facts))}\n:   {indent(linked(text), ' ' * 4).lstrip()}"


def entries(
    section: type, level: int, default: object = None, prefix: str = "", kinds: dict | None = None
) -> Iterator[str]:
    """Yield an entry for each option of a dataclass, and then for those of its sections, under a heading each."""
    kinds = kinds or hints(section)
    bases = reversed(section.__mro__[:-1])
    texts = {param.arg_name: param.description for base in bases for param in parse_from_object(base).params}
    initial = lambda f: f.default if f.default_factory is MISSING else f.default_factory()
    defaults = {f.name: getattr(default, f.name) if default else initial(f) for f in fields(section)}
    for name, value in sorted(defaults.items(), key=lambda item: is_dataclass(item[1])):
        if not is_dataclass(value):
            yield option(prefix + name, kinds[prefix + name], value, texts.get(name))
            continue
        yield f"{'#' * level} `{prefix}{name}`"
        yield " ".join(linked(text) for text in (texts.get(name), type(value).__doc__) if text)
        yield from entries(type(value), level + 1, value, f"{prefix}{name}.", kinds)


def repository_files() -> list[Path]:
    """Return the files that git knows or would add."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    return [Path(name) for name in sorted({*names}) if Path(name).is_file()]


def main() -> None:
    out = Path("build/docs")
    shutil.rmtree(out, ignore_errors=True)
    for path in repository_files():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / path)
    (out / "docs/reference").mkdir()
    text = "\n\n".join(["# Options of a run", linked(INTRO), *entries(Config, 2)])
    (out / "docs/reference/options.md").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
