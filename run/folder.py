"""A run's folder: its lock, whether this command may continue it, and its config.json."""

import dataclasses
import errno
import fcntl
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import jax
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from configs.command_line import config_from_json
from configs.schema import Config, free_to_change, options
from data.dataset import absolute
from hosts.distributed import on_first_process
from hosts.runtime import versions
from model.gpt import parameter_shapes
from run.checkpoint_files import checkpoint_folder, finished_steps
from run.record import (
    TAKEN,
    Events,
    fetch_locally,
    fetch_record,
    is_of_this_process,
    line_of_lock,
    local_path,
    lock_holder,
    other_writer,
    read_metrics,
    reading,
    saved_up_to,
    storage_path,
)
from system.errors import UserError
from system.files import in_bucket, is_there, is_transient, with_retries, write_whole
from system.messages import LOGGER
from training.mesh import device_groups

T = TypeVar("T")
LEASE = 120  # seconds to wait for the lock of a machine that may be gone: NFS servers keep it for 90


class RunLock:
    """The lock of the process that writes to a run's folder, taken inside `with`. The system releases it when the
    process ends, however. A bucket has no locks: there the newest start takes the run over (`take_over`). Every process
    enters; the first one takes the lock."""

    def __init__(self, run_dir: str | Path):
        self.run_dir, self.path = run_dir, local_path(run_dir) / "lock"
        self.file: IO | None = None

    def __enter__(self) -> "RunLock":
        """Take the lock, or fetch the record of a run in a bucket. Raise UserError if another process has the lock, or
        if the folder cannot be written."""
        if "\\" in str(self.path.absolute()):  # tensorstore would write elsewhere
            raise UserError(f"--run_dir={self.run_dir} cannot work: checkpoints need a path without a backslash")
        begin = partial(fetch_record, self.run_dir) if in_bucket(self.run_dir) else self._take
        on_first_process(lambda: writing_to(self.run_dir, begin))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if in_bucket(self.run_dir) and jax.process_index() == 0:
            with suppress(Exception):  # the store may not answer
                if is_of_this_process(lock_holder(self.run_dir)):
                    (storage_path(self.run_dir) / "lock").unlink()
            TAKEN.discard(str(self.run_dir))
        if self.file:
            with suppress(OSError, UserError):  # the disk may be gone, or the events damaged
                if kind and issubclass(kind, UserError):
                    self._leave_nothing()
            self.file.close()

    def _leave_nothing(self) -> None:
        """Delete what a refused start made, if the run has no step, and so nothing worth keeping."""
        folder, record = self.path.parent, self.path.with_name("config.json")
        logged = is_there(folder / "metrics.jsonl") or saved_up_to(Events(folder).read())
        if is_of_a_run(record) and not logged and not finished_steps(self.run_dir):
            for name in ("config.json", "events.jsonl"):
                (folder / name).unlink(missing_ok=True)
        if not is_of_a_run(record):
            self.path.unlink()
            for path in (folder / "checkpoints", folder, folder.parent):
                with suppress(OSError):  # not there, or not empty
                    path.rmdir()

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        waits = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, BlockingIOError) and _is_of_another_machine(file)),
            stop=stop_after_delay(LEASE),
            wait=wait_random(1, 3),
            reraise=True,
        )
        try:
            waits(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path.parent} is being written to by another process ({_holder(file) or 'which has just begun'})"
                "; wait for it, or end it, or choose another --run_dir"
            ) from None  # an error of the disk as its cause would be retried
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            LOGGER.warning(
                f"{self.path.parent} is on a disk without locks: nothing keeps a second process from writing to it"
            )
        file.truncate(0)
        file.write(line_of_lock())
        file.flush()
        self.file = file


def take_over(run_dir: str) -> None:
    """Write this process's name into the lock of a run in a bucket, which has no locks. Report whose name it replaces:
    that process, if it is alive, ends before its next save (`other_writer`). Do nothing on a disk. On the first
    process."""
    if not in_bucket(run_dir):
        return
    if holder := other_writer(run_dir):
        LOGGER.warning(
            f"{run_dir} was being written to by {holder}: if that process is alive, it ends at its next save"
        )
    (storage_path(run_dir) / "lock").write_text(line_of_lock())
    TAKEN.add(run_dir)


def _holder(file: IO) -> str:
    """Return the line of the process that has the lock of this file."""
    file.seek(0)
    return file.read().partition("\n")[0]


def _is_of_another_machine(file: IO) -> bool:
    """Return whether a process of another machine has the lock. It may be gone: an NFS server keeps its lock for a
    while. A process of this machine is alive."""
    return _holder(file) != "" and f" on {platform.node()}, " not in _holder(file)


def writing_to(run_dir: str | Path, function: Callable[[], T]) -> T:
    """Return the result of `function`, for as long as the disk or store needs. Raise UserError if it refuses."""
    try:
        return with_retries(str(run_dir), function)
    except OSError as error:
        raise UserError(f"--run_dir={run_dir} cannot be written: {error}") from error


class RunStatus(NamedTuple):
    """The state of a run by its folder. It converts to JSON, so one process reads it for all."""

    has_steps: bool
    """Whether a start of it came to a step: a start without one does not bind later ones."""
    changes: list[str]
    """Options that differ from the first start's and change the result."""
    finished: int
    """Steps in its summary; 0 without one."""
    saved: int
    """The newest step that was ever saved."""


def open_run(config: Config, fingerprint: str, accept_changes: bool) -> RunStatus:
    """Claim `config.run_dir` for this config, before any compute, and return the run's status.

    Raise UserError if the folder contains something else, or if an option that changes the result differs without
    acceptance. Delete nothing, and record no change yet (`write_start_record`). Only the first process may call it, in
    `writing_to`.
    """
    folder = local_path(config.run_dir)
    record = folder / "config.json"
    if not is_of_a_run(record):
        # A start that ended while it claimed the folder may leave these, and a preflight its file.
        harmless = {"lock", f"{record.name}.partial", ".preflight-0", "on_event.log"}
        harmless |= {path.name for path in folder.glob("traceback-*.txt")}
        if {path.name for path in folder.iterdir()} - harmless:
            raise UserError(f"--run_dir={folder} is not empty and holds no run; choose another folder")
    events = Events(folder).read()
    # Steps only in the metrics: a run before its first checkpoint, or a version without events.
    logged = max((line["step"] for line in read_metrics(folder) if "loss" in line), default=0)
    has_steps = saved_up_to(events) or logged or finished_steps(config.run_dir)
    if not has_steps:
        write_config_json(record, config, fingerprint, [])
        return RunStatus(False, [], 0, 0)
    facts, first = read_config_json(record)
    before = options(first) | {"dataset": facts["dataset"]}
    now = options(dataclasses.replace(config, data=absolute(config.data))) | {"dataset": fingerprint}
    # Another path of the same text is no change.
    named = {"data.source"} if facts["dataset"] != fingerprint else set()
    changes = [
        f"{name}: {before.get(name)} -> {now[name]}"
        for name in now
        if before.get(name) != now[name] and (name in named or not free_to_change(name))
    ]
    if parameter_shapes(first.model) != parameter_shapes(config.model):
        raise UserError(
            f"{folder} holds a run of another network:\n  " + "\n  ".join(changes) + "\n"
            "give the first start's settings to continue it, or another --name to start a new run"
        )
    if changes and not accept_changes:
        raise UserError(
            f"{folder} holds a run with other settings:\n  " + "\n  ".join(changes) + "\n"
            "give the first start's settings to continue it, another --name to start a new run, "
            "or --accept_changes to continue it with these"
        )
    saved = saved_up_to(events) if events else logged
    return RunStatus(True, changes, _finished(folder), saved)


def is_of_a_run(record: Path) -> bool:
    """Return whether a config.json is there, and a run's, perhaps damaged: other programs have such files, too."""
    try:
        content = json.loads(record.read_text())
        return not isinstance(content, dict) or "config" in content
    except ValueError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _finished(folder: Path) -> int:
    try:
        return int(json.loads((folder / "summary.json").read_text())["steps"])
    except (FileNotFoundError, ValueError, LookupError, TypeError):  # it is made again
        return 0


def require_checkpoints(config: Config, saved: int) -> None:
    """Raise UserError if a run was saved up to step `saved`, and its checkpoints are gone: a new start would erase its
    record."""
    if saved and not finished_steps(config.run_dir):
        raise UserError(
            f"{config.run_dir} was saved up to step {saved}, and {checkpoint_folder(config.run_dir)} holds no "
            "checkpoint now: is its disk mounted, were they moved, or deleted? Bring them there, or start a new run "
            "with another --name"
        )


def write_start_record(
    config: Config, fingerprint: str, changes: list[str], step: int, tokens: int, **facts: Any
) -> None:
    """Record that the run continues from `step`, at `tokens` tokens of the data, with the changes and these facts.
    Only the first process may call it, once the state is restored."""
    folder = local_path(config.run_dir)
    record = folder / "config.json"
    recorded, _ = read_config_json(record)
    write_config_json(record, config, fingerprint, recorded["changes"] + ([changes] if changes else []))
    if step < config.steps:
        (folder / "summary.json").unlink(missing_ok=True)  # from a shorter run
    size = config.batch.tokens_per_step
    Events(folder).add("start", step, tokens=tokens, tokens_per_step=size, **facts)


def config_of_run(run_dir: str | Path) -> tuple[dict[str, Any], Config]:
    """Return a run's config.json as a dict, and its Config. Raise UserError if there is no run."""
    record = fetch_locally(run_dir) / "config.json"
    if any(record.parent.glob("*.safetensors")) or any(record.parent.glob("model_*.pt")):
        source = "FOLDER, of a copy here" if in_bucket(run_dir) else run_dir
        raise UserError(
            f"{run_dir} holds a network, not a run; make one of it: python -m interchange.convert --out=runs/NAME "
            f"--source={source}"
        )
    with reading(str(run_dir)):
        is_run = with_retries(str(run_dir), lambda: is_there(record))
    if not is_run:
        runs = ", ".join(str(path.parent) for path in sorted(Path("runs").glob("*/config.json")))
        raise UserError(f"{run_dir} holds no run (no config.json); runs here: {runs or 'none'}")
    return read_config_json(record)


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


def write_config_json(record: Path, config: Config, fingerprint: str, changes: list[list[str]]) -> None:
    """Write a run's config.json: its options, versions and devices."""
    devices = jax.devices()
    facts = {
        # With absolute paths: other commands find the text from any working folder.
        "config": dataclasses.asdict(dataclasses.replace(config, data=absolute(config.data))),
        "dataset": fingerprint,
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
