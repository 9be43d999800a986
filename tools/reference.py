"""Write build/docs, from which `make docs` builds the site: python -m tools.reference.

It has the repository's files at their own paths, so that every link between them works, and under docs/reference/ a page
of each command's options, made of the dataclasses that `--help` prints.
"""

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import tyro
from docstring_parser import parse_from_object
from msgspec import Meta

from configs.schema import Config, Role, hints

ROOT = Path(__file__).parents[1]
COMMANDS = (
    *("train", "evaluate", "sample", "chat", "export", "data.prepare.__main__", "data.prepare.chats"),
    *("tools.plan.__main__", "tools.tune.__main__", "tools.launch.__main__", "tools.report.__main__"),
    *("tools.dataset.__main__", "tools.goodput", "tools.inspect", "tools.doctor"),
)
KINDS = {str: "text", int: "integer", float: "number", bool: "`True` or `False`"}
BOUNDS = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ ", "multiple_of": "multiple of "}
REQUIRED = "required"


def values(hint: Any) -> str:
    """Return which values an option of this type takes: `integer > 0`, or its choices."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return f"several, {values(get_args(kind)[0])}"
    if get_args(kind):
        return " or ".join(values(one) for one in get_args(kind) if one is not NoneType)
    bounds = [
        (sign, getattr(extra, name)) for extra in extras if isinstance(extra, Meta) for name, sign in BOUNDS.items()
    ]
    return f"{KINDS[kind]} {' and '.join(f'{sign}{bound}' for sign, bound in bounds if bound is not None)}".strip()


def linked(text: str | None) -> str:
    """Return a docstring as Markdown: with links to pages and papers, and examples and lists of files as code."""
    text = re.sub(r"\bdocs/[\w-]+\.md", r"[\g<0>](../../\g<0>)", inspect.cleandoc(text or ""))
    text = re.sub(r"arXiv:([\d.]+\d)", r"[\g<0>](https://arxiv.org/abs/\1)", text)
    parts = text.split("\n\n")
    return "\n\n".join(f"```\n{part}\n```" if "  " in part or part.startswith("python ") else part for part in parts)


def option(name: str, hint: Any, value: object, text: str | None) -> str:
    """Return the entry of an option with this default, which starts a run with it if the option is a run's."""
    extras = getattr(hint, "__metadata__", ())
    by_tyro = next((extra.name for extra in extras if hasattr(extra, "prefix_name")), None)
    positional = tyro.conf.Positional in extras
    word = name.upper() if positional else name if Role.FILE in extras else f"--{by_tyro or name}"
    default = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)
    facts = [values(hint), default if value is REQUIRED else f"default `{default}`" if default.strip() else ""]
    facts += ["may change on resume" * (Role.FREE in extras), "in a config file only" * (Role.FILE in extras)]
    return f"`{word}` · {'; '.join(filter(None, facts))}\n:   {linked(text).replace(chr(10), chr(10) + '    ')}"


def entries(
    section: type, level: int, default: object = None, prefix: str = "", kinds: dict | None = None
) -> Iterator[str]:
    """Yield an entry for each option of a dataclass, and then for those of its sections, under a heading each."""
    kinds = kinds or hints(section)
    needed = [f.name for f in fields(section) if f.default is MISSING and f.default_factory is MISSING]
    default = default or section(**dict.fromkeys(needed, REQUIRED))
    bases = reversed(section.__mro__[:-1])
    texts = {param.arg_name: param.description for base in bases for param in parse_from_object(base).params}
    defaults = {f.name: getattr(default, f.name) for f in fields(section)}
    for name, value in sorted(defaults.items(), key=lambda item: is_dataclass(item[1])):
        if not is_dataclass(value):
            yield option(prefix + name, kinds[prefix + name], value, texts.get(name))
            continue
        yield f"{'#' * level} `{prefix}{name}`"
        yield " ".join(linked(text) for text in (texts.get(name), type(value).__doc__) if text)
        yield from entries(type(value), level + 1, value, f"{prefix}{name}.", kinds)


def launchers(module: ModuleType) -> Iterator[str]:
    """Yield the commands of each launcher, and their options, which are the same for all of them."""
    for name, scheduler in module.SCHEDULERS.items():
        yield f"### python -m tools.launch {name}"
        yield linked(scheduler.__doc__)
        yield from (f"`{name}`\n:   {linked(command.__doc__)}" for name, (command, _) in scheduler.COMMANDS.items())
        yield from entries(next(options for _, options in scheduler.COMMANDS.values()), 4)


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    intro = (
        "A config file gives every option of a run, and the command line overrides it: `--model.depth=20`. "
        "The defaults here are those of `configs/schema.py`; `python train.py --config=FILE --help` shows a file's own. "
        "A run that resumes refuses changes of options, except for those marked *may change on resume*, "
        "unless `--accept_changes` is given."
    )
    commands = ["# Commands"]
    for name in COMMANDS:
        module = import_module(name)
        dotted = name.removesuffix(".__main__")
        commands += [f"## python {'-m ' + dotted if '.' in dotted else dotted + '.py'}", linked(module.__doc__)]
        if hasattr(module, "parse"):
            commands += ["`--config` · required\n:   A config file. [Every option of a run](options.md) follows it."]
        if hasattr(module, "Arguments"):
            commands += entries(module.Arguments, 3)
        elif hasattr(module, "SCHEDULERS"):
            commands += launchers(module)
    options = ["# Options of a run", intro, *entries(Config, 2)]
    return {"options.md": "\n\n".join(options) + "\n", "commands.md": "\n\n".join(commands) + "\n"}


def main() -> None:
    out = ROOT / "build/docs"
    shutil.rmtree(out, ignore_errors=True)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for path in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, out / path)
    (out / "docs/reference").mkdir()
    for name, text in pages().items():
        (out / "docs/reference" / name).write_text(text)


if __name__ == "__main__":
    main()
