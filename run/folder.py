"""A run's folder: its record and its checkpoints, on a disk or in a bucket. Without JAX.

A run in a bucket (`--run_dir=gs://BUCKET/RUN`) writes its record, everything but the checkpoints, to a folder of this
process. It is filled from the bucket at a start (`fetch_record`), and uploaded before each checkpoint is complete and
at the end (`upload`). Other commands read a copy (`fetched`).
"""

import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec.config
from etils import epath

from run.record import Events, figures_by_step, read_metrics
from system.errors import StorageLost, UserError
from system.files import first_line, in_bucket, is_there, is_transient, permission_hint, read_if_there, with_retries

FACTS = "facts/metadata"  # the file that makes a checkpoint complete
T = TypeVar("T")


class RunFolder:
    """The folder of one run, by its name as the user gave it. It reads nothing before it is asked."""

    def __init__(self, name: str | Path):
        self.name = str(name)
        self.in_bucket = in_bucket(name)
        self.path = storage_path(name)
        """The folder itself, on a disk or in a bucket."""
        self.taken = False
        """Whether this process has written its name into the lock of a run in a bucket."""
        self.has_copy = False
        """Whether the record of a run in a bucket was fetched."""
        self.uploaded: dict[Path, tuple[int, int]] = {}
        """Size and time of each file that this process has fetched or uploaded."""
        self.uploading = threading.Lock()

    def __str__(self) -> str:
        return self.name

    @cached_property
    def local(self) -> Path:
        """Return the folder on this machine with the record: the run's own, or a copy that is deleted with the
        process."""
        if not self.in_bucket:
            return Path(self.name).expanduser()
        return Path(tempfile.mkdtemp(dir=_copies().name)) / self.path.name

    @property
    def config_json(self) -> Path:
        """Return the file of the run's options."""
        return self.local / "config.json"

    @property
    def tokenizer(self) -> Path:
        """Return the folder of the run's tokenizer."""
        return self.local / "tokenizer"

    @property
    def checkpoints(self) -> epath.Path:
        """Return the folder of the run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Events:
        """Return the run's events."""
        return Events(self.local / "events.jsonl")

    def metrics(self) -> list[dict]:
        """Return the lines of metrics.jsonl, as `run.record.read_metrics` does."""
        return read_metrics(self.local / "metrics.jsonl")

    def figures(self, name: str = "val_bpb") -> dict[int, float]:
        """Return `val_bpb`, or another figure of metrics.jsonl, of each step that has it, if finite."""
        return figures_by_step(self.metrics(), name)

    def finished_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        if not is_there(self.checkpoints):
            return []
        folders = [path for path in self.checkpoints.iterdir() if path.name.isdigit()]
        return sorted(int(path.name) for path in folders if is_there(path / FACTS))

    def lock_holder(self) -> str:
        """Return the line of the process that last took the lock; empty without any."""
        folder = self.path if self.in_bucket else self.local
        return read_if_there(folder / "lock").decode().partition("\n")[0]

    def retried(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `function`, which reads the folder, for as long as its disk or store needs."""
        return with_retries(self.name, partial(function, *arguments))

    def writing(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `function`, for as long as the disk or store needs. Raise UserError if it refuses."""
        try:
            return self.retried(function, *arguments)
        except OSError as error:
            raise UserError(f"--run_dir={self.name} cannot be written: {error}") from error

    def fetched(self) -> Path:
        """Return the folder on this machine with the record; for a run in a bucket, a copy of now. Checkpoints stay in
        the bucket. Raise UserError if nothing is there."""
        if not self.in_bucket or self.has_copy:
            return self.local
        with reading(self.name):
            self.retried(self._fetch)
        if not self.config_json.exists():
            raise UserError(f"{self.name} holds no run (no config.json)")
        return self.local

    def fetch_record(self) -> None:
        """Fill this process's copy of the record of a run in a bucket, if there is one."""
        if self.in_bucket:
            with reading(f"--run_dir={self.name}"):
                self._fetch()

    def _fetch(self) -> None:
        """Copy the files of a folder in a bucket, and of its folder of the tokenizer."""
        self.local.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.path / "tokenizer") if self.path.exists() else ():
            for path in folder.iterdir() if folder.exists() else ():
                # gcsfs lists the placeholder of a folder, which Cloud Console makes, as a file in it.
                if path.name != "lock" and is_there(path) and not path.is_dir():
                    copy = self.local / path.relative_to(self.path)
                    copy.parent.mkdir(exist_ok=True)
                    copy.write_bytes(path.read_bytes())
                    about = copy.stat()
                    self.uploaded[copy] = (about.st_size, about.st_mtime_ns)
        self.has_copy = self.config_json.exists()

    def upload(self) -> None:
        """Copy what changed in the record of a run in a bucket there, and delete what is gone; do nothing for a run on
        a disk. Only the first process may call it. A second thread waits: a save may upload while a failure is
        recorded. Raise UserError if another process has taken the run over."""
        if self.in_bucket:
            if holder := self.retried(self.other_writer):
                raise UserError(f"{self.name} is being written to by another process, too ({holder})")
            with self.uploading:
                self.retried(self._upload)

    def _upload(self) -> None:
        files = [path for path in sorted(self.local.rglob("*")) if path.is_file() and path.suffix != ".partial"]
        board = self.local / "tensorboard"
        if board.exists() and not any(path.is_relative_to(board) for path in list(self.uploaded)):
            old = self.path / board.name
            if old.exists():
                old.rmtree()  # from another process: each writes all lines again, under other names
        present: dict[Path, tuple[int, int]] = {}
        for path in files:
            with suppress(FileNotFoundError):  # deleted meanwhile
                about = path.stat()
                present[path] = (about.st_size, about.st_mtime_ns)
        for path, size_and_time in present.items():
            if size_and_time != self.uploaded.get(path):
                (self.path / path.relative_to(self.local)).write_bytes(path.read_bytes())
                self.uploaded[path] = size_and_time
        for path in [path for path in list(self.uploaded) if path not in present]:
            (self.path / path.relative_to(self.local)).unlink(missing_ok=True)
            del self.uploaded[path]

    def other_writer(self) -> str:
        """Return who took the lock after this process did, if anybody: a bucket has no locks, and some disks lock for
        each machine alone (NFS with local_lock, Lustre with localflock)."""
        holder = self.lock_holder()
        if is_of_this_process(holder):
            return ""
        if not holder and self.taken:
            return "a process that has ended"
        return holder


@cache
def _copies() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tokensum-")


@cache
def line_of_lock() -> str:
    """Return the line of this process for the lock of a run's folder. It is the same at each call: containers may share
    a host's name and a process's number, but not the time."""
    return f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"


def is_of_this_process(line: str) -> bool:
    """Return whether a line of a lock is this process's."""
    return line == line_of_lock().rstrip("\n")


def folder_to_read(name: str | Path) -> RunFolder:
    """Return the folder of a run that a command reads, or that another begins from. Several places of a command ask for
    it, and it copies the record of one in a bucket once. A run that the command writes has a folder of its own."""
    return _folder_at(str(name), str(storage_path(name)))


@cache
def _folder_at(name: str, path: str) -> RunFolder:
    """Return one folder for each name and the path that it has in the working folder."""
    return RunFolder(name)


def storage_path(name: str | Path) -> epath.Path:
    """Return a folder's path, on a disk or in a bucket (`gs://`)."""
    if not in_bucket(name):
        return epath.Path(Path(name).expanduser().resolve())
    # Other processes and tensorstore write to the bucket: a cached listing may be out of date.
    fsspec.config.conf["gcs"] = {**fsspec.config.conf.get("gcs", {}), "use_listings_cache": False}
    return epath.Path(name)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error of a store into a UserError that names `what`, unless it may pass."""
    try:
        yield
    except (UserError, StorageLost):
        raise
    except Exception as error:
        if is_transient(error):
            raise
        raise UserError(f"{what} cannot be read: {first_line(error)}{permission_hint(error)}") from error
