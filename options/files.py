"""Files that give a Config: the Python file of --config, and a run's config.json."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from options.schema import Config, options
from system.errors import UserError

Derive = Callable[[Config, set[str]], Config]


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
