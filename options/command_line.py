"""The command line, parsed to a validated Config."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from options.files import load_config
from options.schema import Config, Role, hints, roles
from options.validation import check_types, resolved, validate, with_homes
from system.errors import UserError
from system.exits import report
from system.messages import repair_streams

T = TypeVar("T")
SWITCHES = tyro.constructors.ConstructorRegistry()
HELP = {"-h", "--help"}
TYRO_S_OWN = {"help", "tyro_print_completion", "tyro_write_completion"}
ALIKE = 0.6  # of names that may be meant, as in difflib.get_close_matches


@SWITCHES.primitive_rule
def switch(option: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
    """Return how tyro reads a bool: `--deterministic`, `--deterministic=True` or `--deterministic=False`; None for an
    option of another type."""
    if option.type is not bool:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="[{True,False}]",
        instance_from_str=lambda words: words != ["False"],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=("True", "False"),
    )


@dataclass(frozen=True)
class _NoMore:
    """Options of a command that has only the config's."""


def parse(
    description: str | None,
    extra: type[T] = _NoMore,
    argv: list[str] | None = None,
    config_of_run: Callable[[str], Config] | None = None,
) -> tuple[Config, T]:
    """Parse `--config=FILE`, overrides of its fields, and the fields of the dataclass `extra`. Without --config, the
    defaults are `config_of_run(--run_dir)`, if both are given.

    tyro prints a wrong value, or the help, and exits (codes 2 and 0). Raise UserError for other mistakes.
    """
    path, argv = _value_and_others("config", argv)
    run_dir, _ = _value_and_others("run_dir", argv)
    default, derive = Config(name="NAME"), lambda config, given: config
    if path:
        default, derive = load_config(path)
    elif config_of_run and run_dir and not HELP & set(argv):
        default = config_of_run(os.path.expanduser(run_dir))
    else:
        _require_help(argv)
    both = _read_both(description, extra, argv, default)
    # tyro takes hyphens for underscores.
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    config = check_types(both.config)
    if "ratio" in given and (not path or default.ratio is None or {"steps", "epochs"} & given):
        raise UserError("--ratio gives the steps of --config=configs/nanochat.py, without --steps and --epochs")
    if "epochs" in given:
        if config.steps and "steps" in given:
            raise UserError("--epochs and --steps both give the length of the run: leave one out")
        config, given = replace(config, steps=0), given | {"steps"}
    config = resolved(derive(config, given))
    validate(config)
    return config, with_homes(check_types(both.extra))


def parse_own(description: str | None, extra: type[T]) -> T:
    """Parse the fields of the dataclass `extra`, of a command that has a config, too. Check the names and types of the
    config's options. Run no config file, but for the help."""
    path, words = _value_and_others("config", None)
    if HELP & set(words):
        parse(description, extra)  # which prints it, with the file's defaults
    _require_known(words, Config, extra)
    if not path and not _value_and_others("run_dir", words)[0]:
        _require_help(words)
    both = _read_both(description, extra, words, Config(name="NAME"))
    check_types(both.config)
    return with_homes(check_types(both.extra))


def refuse_mistakes(parse_options: Callable[[str | None, type[Any]], Any], description: str | None, kind: type) -> None:
    """Parse a command's options before it imports what takes seconds, and end it with a message and code 2 if they are
    mistaken. The command parses them again, and knows the codes of other errors."""
    repair_streams()
    try:
        parse_options(description, kind)
    except UserError as error:
        sys.exit(report(error))


def _require_help(words: list[str]) -> None:
    """Raise UserError unless a command without a config is asked for its help."""
    if not HELP & set(words):
        meant = next((word for word in words if not word.startswith("-")), "configs/small.py")
        raise UserError(f"--config is missing; try --config={meant}")


def _value_and_others(name: str, argv: list[str] | None) -> tuple[str | None, list[str]]:
    """Return the value of an option among these words, by default the command's, and the other words."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest="value", nargs="?")
    taken, words = known.parse_known_args(sys.argv[1:] if argv is None else argv)
    return taken.value, words


def _read_both(description: str | None, extra: type, words: list[str], default: Config) -> Any:
    """Return the words as an object with `config`, in which `default` is overridden, and `extra`."""
    kind = make_dataclass(
        "Arguments",
        [
            ("config", Annotated[Config, tyro.conf.arg(name="")], field(default=default)),
            ("extra", Annotated[extra, tyro.conf.arg(name="")], field(default=extra())),
        ],
    )
    _require_known(words, Config, extra)
    about = f"{description or ''}\n\n--config FILE gives every option below its default."
    return _read(kind, words, about, None)


def parse_arguments(
    description: str | None, arguments: type[T], argv: list[str] | None = None, program: str | None = None
) -> T:
    """Parse the fields of the dataclass `arguments` alone, for a command that has no config. Raise UserError for a
    value that its field's type does not allow."""
    words = sys.argv[1:] if argv is None else argv
    _require_known(words, arguments)
    _require_given(words, description, arguments)
    return with_homes(check_types(_read(arguments, words, description, program)))


def _require_given(words: Sequence[str], description: str | None, arguments: Any) -> None:
    """Raise UserError, with the command that the description begins with, if an option without a default is missing."""
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words if word.startswith("-")}
    if given & {"h", *TYRO_S_OWN}:
        return
    needed = {one.name for one in fields(arguments) if one.default is MISSING and one.default_factory is MISSING}
    positional = {
        name for name, hint in hints(arguments).items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())
    }
    missing = [f"--{name}" for name in sorted(needed - positional - given)]
    missing += [name.upper() for name in sorted(needed & positional) if not words]
    if missing:
        verb, about = "is" if len(missing) == 1 else "are", (description or "").partition("\n")[0]
        raise UserError(f"{' and '.join(missing)} {verb} missing. {about}")


def _read(kind: type[T], words: list[str], description: str | None, program: str | None) -> T:
    """Return the words as a `kind`. tyro's messages name `program`, by default the command as typed."""
    if HELP & set(words):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # pdb and notebooks have none
    name = spec.name.removesuffix(".__main__") if spec else ""
    program = program or (f"python -m {name}" if name else f"python {Path(sys.argv[0]).name}")
    return tyro.cli(
        kind,
        prog=program,
        description=description,
        args=words,
        use_underscores=True,
        config=[tyro.conf.FlagConversionOff],
        registry=SWITCHES,
    )


def _require_known(words: Sequence[str], *sections: type) -> None:
    """Raise UserError for an option that is not a field of the sections, with those whose names are most like it. Who
    asks for the help gets it."""
    if HELP & set(words):
        return
    found = {name: of for section in sections for name, of in roles(section).items()}
    known = [name for name, of in found.items() if Role.FILE not in of]
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if not word.startswith("--") or name in {*known, *TYRO_S_OWN}:
            continue
        if name in found:
            raise UserError(f"--{name}: only a config file sets this option")
        likeness = {option: _likeness(name, option) for option in known}
        nearest = sorted(known, key=lambda option: likeness[option], reverse=True)[:3]
        least = max(ALIKE, likeness[nearest[0]][0] - 0.1)
        alike = [f"--{option}" for option in nearest if likeness[option][0] >= least]
        meant = f"; did you mean {' or '.join(alike)}?" if alike else ""
        raise UserError(f"--{name}: there is no such option (--help lists all){meant}")


def _likeness(name: str, option: str) -> tuple[float, float]:
    """Return how much a name is like an option's, between 0 and 1: with the better of its last part, which is 1 if it
    begins with the name, and the whole; then as a whole."""
    last, of_option = name.rpartition(".")[2], option.rpartition(".")[2]
    whole = SequenceMatcher(None, name, option).ratio()
    part = 1.0 if of_option.startswith(last) else SequenceMatcher(None, last, of_option).ratio()
    return max(whole, part), whole
