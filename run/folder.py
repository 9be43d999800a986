"""A run's folder: who made it, whether this command continues it, and what it tells afterwards."""

import dataclasses
import fcntl
import json
import os
import platform
import time
from pathlib import Path
from typing import IO, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh

from configs.command_line import config_from_json
from configs.schema import Config, MeshConfig, UserError, free_to_change, options, validate
from run.checkpoint import Checkpoints, copy
from run.runtime import versions
from training.build import build
from training.state import TrainState, abstract_params


class RunLock:
    """Held by the process that writes to a run's folder; the system lets go of it when that process ends, however."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / "lock"
        self.file: IO | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        if self.file:
            self.file.close()

    def take(self) -> None:
        """Takes it, if this process has not yet. UserError where another one holds it."""
        if self.file:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise UserError(
                f"{self.path.parent} is being written to by another process ({file.read()}); wait for it, or end it, "
                "or choose another --run_dir"
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        self.file = file


def record_files(run_dir: str | Path) -> list[Path]:
    """What continues a run, besides its checkpoints."""
    return [Path(run_dir) / "config.json", Path(run_dir) / "metrics.jsonl"]


def open_run(config: Config, fingerprint: str, accept_changes: bool, lock: RunLock) -> list[str]:
    """Claims `config.run_dir` for this config, before any compute, and returns what changed since its first start.

    UserError where the folder holds something else or cannot be written, where an option that makes the result differs
    and the change is not accepted, where `resume` forbids what was found, or another process writes to it. Nothing is
    deleted. Only the first process may call it.
    """
    try:
        return _open_run(config, fingerprint, accept_changes, lock)
    except OSError as error:
        raise UserError(f"--run_dir={config.run_dir} cannot be written: {error}") from error


def _open_run(config: Config, fingerprint: str, accept_changes: bool, lock: RunLock) -> list[str]:
    folder = Path(config.run_dir)
    record = folder / "config.json"
    if not record.exists():
        # A start that was killed while it claimed the folder may have left its record half written.
        if folder.exists() and any(path.name not in ("config.partial", "lock") for path in folder.iterdir()):
            raise UserError(f"--run_dir={folder} is not empty and holds no run (no config.json); choose another folder")
        elsewhere = epath.Path(config.checkpoint.folder)
        if not (config.checkpoint.folder and (elsewhere / record.name).exists()):
            if config.resume == "must":
                raise UserError(f"--resume=must, but there is no run in {folder}")
            lock.take()
            _write_record(record, config, fingerprint, [])
            return []
        if config.resume == "never":
            raise UserError(f"--resume=never, but {elsewhere} holds a run already; choose another --checkpoint.folder")
        lock.take()
        for path in reversed(record_files(folder)):  # the one that claims the folder comes last
            copy(elsewhere / path.name, epath.Path(path))
    if config.resume == "never":
        raise UserError(f"--resume=never, but {folder} holds a run already; choose another --run_dir or --name")
    lock.take()
    told = json.loads(record.read_text())
    before = options(config_from_json(json.dumps(told["config"]))) | {"dataset": told["dataset"]}
    now = options(config) | {"dataset": fingerprint}
    changes = [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name] and not free_to_change(name)
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
    """The run in `run_dir` with its newest checkpoint's parameters. UserError where there is no run or checkpoint, or
    where the mesh cannot divide its network."""
    config, fingerprint = _read_record(run_dir)
    validate(dataclasses.replace(config, mesh=MeshConfig(**mesh.shape)))
    params, step = Checkpoints(config.checkpoint.folder or run_dir).restore_params(abstract_params(config.model, mesh))
    return Run(config, fingerprint, params, step)


def open_for_reading(run_dir: str | Path) -> tuple[Checkpoints, TrainState]:
    """A run's checkpoints, and what to restore them as on one device."""
    config, _ = _read_record(run_dir)
    built = build(dataclasses.replace(config, mesh=MeshConfig()), jax.devices()[:1])
    return Checkpoints(config.checkpoint.folder or run_dir), built.abstract_state


def _read_record(run_dir: str | Path) -> tuple[Config, str]:
    record = Path(run_dir) / "config.json"
    if not record.is_file():
        runs = ", ".join(str(found.parent) for found in sorted(Path("runs").glob("*/config.json")))
        raise UserError(f"--run_dir={run_dir} holds no run (no config.json); runs here: {runs or 'none'}")
    told = json.loads(record.read_text())
    return config_from_json(json.dumps(told["config"])), told["dataset"]


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
