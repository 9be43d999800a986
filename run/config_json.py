"""A run's config.json: its options, the text that it was begun with, and the changes that were accepted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from data.dataset import absolute
from hosts.runtime import versions
from options.files import config_from_json
from options.schema import Config
from run.folder import RunFolder, reading
from system.errors import UserError
from system.files import is_there, is_transient, write_whole
from training.mesh import device_groups


def config_of_run(folder: RunFolder) -> tuple[dict[str, Any], Config]:
    """Return a run's config.json as a dict, and its Config. Raise UserError if there is no run."""
    record = folder.fetched() / "config.json"
    if any(record.parent.glob("*.safetensors")) or any(record.parent.glob("model_*.pt")):
        source = "FOLDER, of a copy here" if folder.in_bucket else folder.name
        raise UserError(
            f"{folder} holds a network, not a run; make one of it: python -m interchange.convert --out=runs/NAME "
            f"--source={source}"
        )
    with reading(folder.name):
        is_run = folder.retried(is_there, record)
    if not is_run:
        runs = ", ".join(str(path.parent) for path in sorted(Path("runs").glob("*/config.json")))
        raise UserError(f"{folder} holds no run (no config.json); runs here: {runs or 'none'}")
    return read_config_json(record)


def is_of_a_run(record: Path) -> bool:
    """Return whether a config.json is there, and a run's, perhaps damaged: other programs have such files, too."""
    try:
        content = json.loads(record.read_text())
        return not isinstance(content, dict) or "config" in content
    except ValueError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_config_json(record: Path) -> tuple[dict[str, Any], Config]:
    """Return a run's config.json as a dict, and the Config in it. Raise UserError if it cannot be read, OSError if its
    disk does not answer."""
    try:
        facts = json.loads(record.read_text())
        config = config_from_json(json.dumps(facts["config"]))
        _ = facts["dataset"], facts["changes"]
        return facts, config
    except (OSError, ValueError, LookupError, TypeError) as error:
        if is_transient(error):
            raise
        raise UserError(
            f"{record} cannot be read ({type(error).__name__}: {error}); it describes the run: restore it"
        ) from error


def write_config_json(
    record: Path, config: Config, fingerprint: str, changes: list[list[str]], row_order: int = 0
) -> None:
    """Write a run's config.json: its options, text, versions and devices. `row_order`: the number of the order in which
    the text gives rows; 0 if it gives none."""
    devices = jax.devices()
    facts = {
        # With absolute paths: other commands find the text from any working folder.
        "config": dataclasses.asdict(dataclasses.replace(config, data=absolute(config.data))),
        "dataset": fingerprint,
        "row_order": row_order,
        "versions": versions(),
        "devices": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": jax.process_count(),
            "slices": len(device_groups(devices)),
        },
        "changes": changes,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps(facts, indent=2))
