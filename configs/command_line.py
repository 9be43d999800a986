"""The command line, parsed to a validated Config, and the codes with which commands exit."""

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import tyro

from configs.messages import repair_streams
from configs.schema import Config, UserError, hints, options
from configs.validation import check_types, resolved, validate, with_homes

T = TypeVar("T")
Derive = Callable[[Config, set[str]], Config]


class Exit(IntEnum):
    """Exit codes: the one table that everything reads (docs/checkpoints.md). Other codes come from the system (134,
    137, 139: signals); a few restarts may help. JAX ends a process that has lost another one with 134."""

    COMPLETE = 0
    FAILED = 1
    """Do not repeat it: it would fail again."""
    MISTAKE = 2
    """A user's mistake; nothing was changed."""
    UNREADABLE = 3
    """No checkpoint can be read, or the one asked for is damaged."""
    PEER_LOST = 42
    """Another process has stopped or cannot be reached, or a step hangs: start all of them again."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C; saved."""
    PREEMPTED = 143
    """Stopped by SIGTERM; saved: start again."""


@dataclass(frozen=True)
class _NoMore:
    """Options of a command that has only the config's."""


def load_config(path: str) -> tuple[Config, Derive]:
    """Run the config file's `get_config()`, and find its `derive(config, given)`, which sets options that depend on the
    given ones. Raise UserError if the file is missing, fails, or returns no Config."""
    path = os.path.expanduser(path)  # a shell leaves the ~ of --config=~/mine.py
    if not Path(path).is_file():
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if "\ndef get_config(" in p.read_text()))
        raise UserError(f"--config={path}: no such file; configs here: {known or 'none; run it in the repository'}")
    spec = importlib.util.spec_from_file_location("run_config", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config={path}: not a Python file; a config ends in .py and defines get_config() -> Config")
    module, loader = importlib.util.module_from_spec(spec), spec.loader

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a file's sys.exit(0) must not look like a complete run
            raise UserError(f"--config={path}: the file fails with {type(error).__name__}: {error}") from error

    def require_config(config: Any, name: str) -> Config:
        if not isinstance(config, Config):
            raise UserError(f"--config={path}: the file must define {name}() that returns a configs.schema.Config")
        return config

    def derive(config: Config, given: set[str]) -> Config:
        return require_config(call(module.derive, config, given), "derive")

    call(loader.exec_module, module)
    config = require_config(call(module.get_config) if hasattr(module, "get_config") else None, "get_config")
    return config, derive if hasattr(module, "derive") else lambda config, given: config


def parse(description: str | None, extra: type[T] = _NoMore, argv: list[str] | None = None) -> tuple[Config, T]:
    """Parse `--config=FILE`, overrides of its fields, and the fields of the dataclass `extra`.

    tyro prints a wrong option, or the help, and exits (codes 2 and 0). Raise UserError for other mistakes.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--config", nargs="?")
    taken, argv = known.parse_known_args(argv)
    path = taken.config
    if not path and not {"-h", "--help"} & set(argv):
        meant = next((word for word in argv if not word.startswith("-")), "configs/small.py")
        raise UserError(f"--config is missing; try --config={meant}")
    default, derive = load_config(path) if path else (Config(name="NAME"), lambda config, given: config)
    both = _read(
        make_dataclass(
            "Arguments",
            [
                ("config", Annotated[Config, tyro.conf.arg(name="")], field(default=default)),
                ("extra", Annotated[extra, tyro.conf.arg(name="")], field(default=extra())),
            ],
        ),
        _in_tyro_s_spelling(argv, Config, extra),
        f"{description or ''}\n\n--config FILE (required) gives every option below its default.",
    )
    # tyro takes hyphens for underscores.
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    config = check_types(both.config)
    if "ratio" in given and (default.ratio is None or {"steps", "epochs"} & given):
        raise UserError("--ratio gives the steps of configs/nanochat.py: leave out --steps and --epochs, or --ratio")
    if "epochs" in given:
        if config.steps and "steps" in given:
            raise UserError("--epochs and --steps both give the length of the run: leave one out")
        config, given = replace(config, steps=0), given | {"steps"}
    config = resolved(derive(config, given))
    validate(config)
    return config, with_homes(check_types(both.extra))


def parse_arguments(
    description: str | None, arguments: type[T], argv: list[str] | None = None, program: str | None = None
) -> T:
    """Parse the fields of the dataclass `arguments` alone, for a command that has no config. Raise UserError for a
    value that its field's type does not allow."""
    words = _in_tyro_s_spelling(sys.argv[1:] if argv is None else argv, arguments)
    return with_homes(check_types(_read(arguments, words, description, program)))


def _read(kind: type[T], words: list[str], description: str | None, program: str | None = None) -> T:
    """Return the words as a `kind`. tyro's messages name `program`, by default the command as typed."""
    if {"-h", "--help"} & set(words):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # pdb and notebooks have none
    name = spec.name.removesuffix(".__main__") if spec else ""
    program = program or (f"python -m {name}" if name else f"python {Path(sys.argv[0]).name}")
    return tyro.cli(kind, prog=program, description=description, args=words, use_underscores=True)


def exit_code_of(main: Callable[[], int], interrupted: str) -> int:
    """Run a command that does not start JAX (hosts/runtime.py runs those that do); a UserError becomes its message and
    code 2. `interrupted`: the message after Ctrl-C."""
    repair_streams()
    try:
        return main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.MISTAKE
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return Exit.INTERRUPTED


def _in_tyro_s_spelling(words: Sequence[str], *sections: type) -> list[str]:
    """Return `--deterministic=False` as `--no_deterministic`, and `--deterministic=True` as `--deterministic`."""
    kinds = {name: hint for section in sections for name, hint in hints(section).items()}
    spelled = []
    for word in words:
        option, _, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        kind = kinds.get(name) if option.startswith("--") else None
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        section, dot, last = name.rpartition(".")
        if kind is bool:
            spelled.append({"True": option, "False": f"--{section}{dot}no_{last}"}.get(value, word))
        else:
            spelled.append(word)
    return spelled


def config_from_json(text: str) -> Config:
    """Return the Config that `json.dumps(dataclasses.asdict(config))` wrote. Raise UserError for another version's
    options."""
    try:
        config = msgspec.json.decode(text, type=Config)
    except msgspec.ValidationError as error:
        raise UserError(f"config.json is from another version: {error}") from error
    if unknown := _names(json.loads(text)) - options(config).keys():
        names = sorted(unknown)
        more = f" and {len(names) - 3} more" if names[3:] else ""
        raise UserError(
            f"config.json has options that this version does not know: {', '.join(names[:3])}{more}; use the run with "
            "the commit that began it"
        )
    return config


def _names(values: dict[str, Any]) -> set[str]:
    """Return the options' command-line names in nested dictionaries."""
    nested = {name: _names(value) if isinstance(value, dict) else () for name, value in values.items()}
    return {f"{name}.{inner}" if inner else name for name, names in nested.items() for inner in names or ("",)}
