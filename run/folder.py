"""A run's folder: its lock, whether this command may continue it, and its config.json."""

import dataclasses
import errno
import fcntl
import json
import os
import platform
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

import jax
from etils import epath
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from configs.command_line import config_from_json
from configs.files import write_whole
from configs.messages import LOGGER
from configs.retry import patiently
from configs.schema import Config, UserError, free_to_change, options
from data.dataset import absolute
from hosts.runtime import versions
from run.checkpoint import read_facts, whole_steps
from run.record import CONTINUES, Events, Record, another_went_on, place, read_metrics, reading, saved_up_to
from training.mesh import islands

MADE = ("lock", "config.json")  # files that a refused start makes in a run's folder
LEASE = 120  # seconds to wait for the lock of a machine that may be gone: NFS servers keep it for 90


class RunLock:
    """The lock of the process that writes to a run's folder. The system releases it when the process ends, however."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / "lock"
        self.file: IO | None = None
        self.claimed = False
        """True if the folder has no step, and so nothing worth keeping."""

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.file:
            return
        with suppress(OSError):
            if kind and issubclass(kind, UserError):
                self._leave_nothing()
        self.file.close()

    def _leave_nothing(self) -> None:
        """Delete the files of a refused start, unless the folder contains others."""
        folder, made = self.path.parent, (*MADE, "events.jsonl") if self.claimed else MADE[:1]
        if {path.name for path in folder.iterdir()} <= {*made, "checkpoints"}:
            if (folder / "checkpoints").exists():
                (folder / "checkpoints").rmdir()  # OSError unless it is empty
            for name in made:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def take(self) -> None:
        """Take the lock, if this process does not have it. Raise UserError if another process has it."""
        if self.file:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        waits = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, BlockingIOError) and self._is_of_another(file)),
            stop=stop_after_delay(LEASE),
            wait=wait_random(1, 3),
            before_sleep=lambda state: self._say_waiting(file) if state.attempt_number == 1 else None,
            reraise=True,
        )
        holder = ""
        try:
            waits(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder(file)[0] or "which has just begun"
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            LOGGER.warning(
                f"{self.path.parent} is on a disk without locks: nothing keeps a second process from writing to it"
            )
        if holder:
            raise UserError(
                f"{self.path.parent} is being written to by another process ({holder}); wait for it, or end it, "
                "or choose another --run_dir"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n{_boot()}")
        file.flush()
        self.file = file

    def _holder(self, file: IO) -> list[str]:
        """Return the writer of the file: a line for people, and the machine's boot."""
        file.seek(0)
        return [*file.read().splitlines(), "", ""][:2]

    def _is_of_another(self, file: IO) -> bool:
        """Return whether a process of another machine has the lock. It may be gone: an NFS server keeps its lock for a
        while. A process of this machine is alive."""
        return self._holder(file)[1] not in ("", _boot())

    def _say_waiting(self, file: IO) -> None:
        holder = self._holder(file)[0]
        LOGGER.info(f"{self.path} is locked ({holder}): waiting up to {LEASE} s, in case its machine is gone")


def _boot() -> str:
    """Return the identity of this machine's boot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


class Past(NamedTuple):
    """The state of a run by its folder. It converts to JSON, so one process reads it for all."""

    changes: list[str]
    """Options that differ from the first start's and change the result."""
    events: list[dict]
    finished: int
    """Steps in its summary; 0 without one."""
    saved: int
    """The newest step that was ever saved."""
    saved_in: str
    """The folder where."""


def open_run(config: Config, fingerprint: str, accept_changes: bool, lock: RunLock) -> Past:
    """Claim `config.run_dir` for this config, before any compute, and return the run's past.

    Raise UserError if the folder contains something else, cannot be written, or is in use by another process. Raise it
    also if an option that changes the result differs without acceptance, or if `resume` forbids the folder's state.
    Delete nothing, and record no change yet (`accept`). Only the first process may call it.
    """
    try:
        return patiently(config.run_dir, lambda: _open_run(config, fingerprint, accept_changes, lock))
    except OSError as error:
        raise UserError(f"--run_dir={config.run_dir} cannot be written: {error}") from error


def _open_run(config: Config, fingerprint: str, accept_changes: bool, lock: RunLock) -> Past:
    folder, elsewhere = Path(config.run_dir), config.checkpoint.folder
    record, checkpoints = folder / "config.json", f"--checkpoint.folder={elsewhere}"
    with reading(checkpoints):
        copied = elsewhere != "" and (place(elsewhere) / record.name).exists()
    if not (record.exists() or copied) and (saved := _saved_facts(config)):
        lock.take()
        first = config_from_json(json.dumps(saved["config"]))
        write_record(record, first, saved["dataset"], [], saved.get("run_id", ""))
        LOGGER.warning(f"{record} was missing: it is written again from checkpoint {saved['step']}")
    if not record.exists():
        # A start that ended while it claimed the folder may leave these.
        harmless = {*MADE, f"{record.name}.partial", "on_event.log"}
        harmless |= {path.name for path in folder.glob("traceback-*.txt")}
        if copied:
            harmless |= {part for name in CONTINUES for part in (name.split("/")[0], f"{name}.partial")}
        if folder.exists() and {path.name for path in folder.iterdir()} - harmless:
            raise UserError(f"--run_dir={folder} is not empty and holds no run (no config.json); choose another folder")
    lock.take()
    mine = Events(folder).read()
    with reading(checkpoints) if elsewhere else nullcontext():
        others = Events(elsewhere).read() if copied else []
        fetching = copied and (not record.exists() or another_went_on(mine, others))
        # Steps only in the metrics: a run before its first checkpoint, or a version without events.
        logged = max((line["step"] for line in read_metrics(folder) if "loss" in line), default=0)
        has_steps = saved_up_to(others if fetching else mine) or logged or whole_steps(checkpoint_folder(config))
    if config.resume == "must" and not has_steps:
        raise UserError(f"--resume=must, but there is no run in {folder}")
    if config.resume == "never" and has_steps:
        holder, option = (elsewhere, "checkpoint.folder") if fetching else (folder, "run_dir or --name")
        raise UserError(f"--resume=never, but {holder} holds a run already; choose another --{option}")
    if fetching:
        if record.exists():
            LOGGER.info(f"another machine has continued this run: fetching its record from {elsewhere}")
        with reading(checkpoints):
            Record(folder, elsewhere).fetch()
    if not has_steps:  # a start without a step does not bind later ones
        lock.claimed = True
        write_record(record, config, fingerprint, [], uuid4().hex)
        return Past([], [], 0, 0, "")
    facts, first = read_record(record)
    before = options(first) | {"dataset": facts["dataset"]}
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
    events = Events(folder).read()
    saved = saved_up_to(events) if events else logged
    return Past(changes, events, _finished(folder), saved, first.checkpoint.folder or str(folder))


def _saved_facts(config: Config) -> dict[str, Any] | None:
    """Return the run's facts from its newest readable checkpoint."""
    folder = checkpoint_folder(config)
    for step in reversed(whole_steps(folder)):
        with suppress(ValueError, OSError):
            return read_facts(folder / str(step))
    return None


def _finished(folder: Path) -> int:
    try:
        return int(json.loads((folder / "summary.json").read_text())["steps"])
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged: it is made again
        return 0


def checkpoint_folder(config: Config) -> epath.Path:
    """Return the folder of a run's checkpoints."""
    return place(config.checkpoint.folder or config.run_dir) / "checkpoints"


def require_checkpoints(config: Config, past: Past) -> None:
    """Raise UserError if a run has saved checkpoints that are gone: a new start would erase its record."""
    folder = checkpoint_folder(config)
    if past.saved and not whole_steps(folder):
        raise UserError(
            f"{config.run_dir} was saved up to step {past.saved} in {past.saved_in}/checkpoints, and {folder} holds no "
            "checkpoint now: is its disk mounted, were they moved, or deleted? Bring them there, or start a new run "
            "with another --name"
        )


def accept(config: Config, fingerprint: str, changes: list[str], step: int, tokens: int, **facts: Any) -> None:
    """Record that the run continues from `step`, at `tokens` tokens of the data, with the changes and these facts.
    Only the first process may call it, once the state is restored."""
    folder = Path(config.run_dir)
    record = folder / "config.json"
    recorded, _ = read_record(record)
    all_changes = recorded["changes"] + ([changes] if changes else [])
    write_record(record, config, fingerprint, all_changes, recorded.get("run_id", ""))
    if step < config.steps:
        (folder / "summary.json").unlink(missing_ok=True)  # from a shorter run
    size = config.batch.tokens_per_step
    Events(folder).add("start", step, tokens=tokens, tokens_per_step=size, **facts)


def run_id(run_dir: str | Path) -> str:
    """Return the identity of a run, drawn at its first start; empty for a run of before. Its checkpoints have it."""
    return read_record(Path(run_dir) / "config.json")[0].get("run_id", "")


def record_of(run_dir: str | Path) -> tuple[dict[str, Any], Config]:
    """Return a run's config.json as a dict, and its Config. Raise UserError if there is no run."""
    record = Path(run_dir).expanduser() / "config.json"
    if not record.is_file() and whole_steps(epath.Path(record.parent) / "checkpoints"):
        raise UserError(f"{record} is missing; the train.py command of this run writes it again from its checkpoints")
    if not record.is_file():
        runs = ", ".join(str(path.parent) for path in sorted(Path("runs").glob("*/config.json")))
        raise UserError(f"{run_dir} holds no run (no config.json); runs here: {runs or 'none'}")
    return read_record(record)


def read_record(record: Path) -> tuple[dict[str, Any], Config]:
    """Return a run's config.json as a dict, and the Config in it. Raise UserError if it cannot be read."""
    try:
        facts = json.loads(record.read_text())
        config = config_from_json(json.dumps(facts["config"]))
        _ = facts["dataset"], facts["changes"]
        return facts, config
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{record} cannot be read ({type(error).__name__}: {error}); it describes the run. Restore it: with "
            "--checkpoint.folder there is a copy next to the checkpoints"
        ) from error


def write_record(record: Path, config: Config, fingerprint: str, changes: list[list[str]], run_id: str = "") -> None:
    """Write a run's config.json: its identity, options, versions and devices."""
    devices = jax.devices()
    facts = {
        "run_id": run_id,
        # With absolute paths: other commands find the text from any working folder.
        "config": dataclasses.asdict(dataclasses.replace(config, data=absolute(config.data))),
        "dataset": fingerprint,
        "versions": versions(),
        "devices": {
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": jax.process_count(),
            "slices": len(islands(devices)),
        },
        "changes": changes,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(record, json.dumps(facts, indent=2))
