"""A run's folder: who made it, whether this command continues it, and what it tells afterwards."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from configs.command_line import config_from_json
from configs.schema import FREE_TO_CHANGE, Config, UserError, options
from training.checkpoint import Checkpoints
from training.runtime import versions
from training.state import abstract_params


def open_run(config: Config, fingerprint: str, accept_changes: bool) -> list[str]:
    """Claims `config.run_dir` for this config, before any compute, and returns what changed since its first start.

    UserError where the folder holds something else, where an option that makes the result differs and the change is
    not accepted, or where `resume` forbids what was found. Nothing is deleted. Only the first process may call it.
    """
    folder = Path(config.run_dir)
    record = folder / "config.json"
    if not record.exists():
        # A start that was killed while it claimed the folder may have left its record half written.
        if folder.exists() and any(path.name != "config.partial" for path in folder.iterdir()):
            raise UserError(f"--run_dir={folder} is not empty and holds no run (no config.json); choose another folder")
        if config.resume == "must":
            raise UserError(f"--resume=must, but there is no run in {folder}")
        _write_record(record, config, fingerprint, [])
        return []
    if config.resume == "never":
        raise UserError(f"--resume=never, but {folder} holds a run already; choose another --run_dir or --name")
    told = json.loads(record.read_text())
    before = options(config_from_json(json.dumps(told["config"]))) | {"dataset": told["dataset"]}
    now = options(config) | {"dataset": fingerprint}
    changes = [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name] and not name.startswith(FREE_TO_CHANGE)
    ]
    if changes and not accept_changes:
        raise UserError(
            f"{folder} holds a run with other settings:\n  " + "\n  ".join(changes) + "\n"
            "give the first start's settings to continue it, another --name to start a new run, "
            "or --accept_changes to continue it with these"
        )
    if changes:
        _write_record(record, config, fingerprint, [*told["changes"], changes])
    return changes


class Run(NamedTuple):
    """What a command needs of a run to use its newest checkpoint."""

    config: Config
    dataset: str
    """Fingerprint of the dataset it trains on."""
    params: dict
    """Float32 parameters over the replicas of the mesh."""
    step: int
    """The checkpoint's step."""


def load_run(run_dir: str | Path, mesh: Mesh) -> Run:
    """The run in `run_dir` with its newest checkpoint's parameters. UserError where there is no run or checkpoint."""
    record = Path(run_dir) / "config.json"
    if not record.is_file():
        runs = ", ".join(str(found.parent) for found in sorted(Path("runs").glob("*/config.json")))
        raise UserError(f"--run_dir={run_dir} holds no run (no config.json); runs here: {runs or 'none'}")
    told = json.loads(record.read_text())
    config = config_from_json(json.dumps(told["config"]))
    params, step = Checkpoints(run_dir).restore_params(abstract_params(config.model, mesh))
    return Run(config, told["dataset"], params, step)


def _write_record(record: Path, config: Config, fingerprint: str, changes: list[list[str]]) -> None:
    devices = jax.devices()
    told = {
        "config": dataclasses.asdict(config),
        "dataset": fingerprint,
        "versions": versions(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
        "changes": changes,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    partial = record.with_suffix(".partial")
    partial.write_text(json.dumps(told, indent=2))
    partial.rename(record)
