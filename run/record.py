"""A run's record: everything in its folder but the checkpoints. Without JAX.

A run in a bucket (`--run_dir=gs://BUCKET/RUN`) writes its record to a folder of this process, which is filled from the
bucket at a start, and uploaded before each checkpoint is complete and at the end (`upload`). Other commands read a copy
(`fetch_locally`). Events are never rewritten; a resumed run drops metrics after its checkpoint (run/metrics.py).

events.jsonl has these lines. `fitted`: the rows that `batch.rows_per_device=auto` chose. `start`: the step, the
tokens before it, tokens per step, the code's hash, versions, devices and mesh. `saved`: a complete checkpoint.
`went_back`: the older checkpoint of `--resume_step`. `out_of_memory`: the rows of the next start.
`stop`: the last step, the exit code, and the process's seconds by activity. Events identify a run whose
checkpoints are gone, and the batch that each step saw.
"""

import json
import math
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec.config
from etils import epath

from system.errors import StorageLost, UserError
from system.files import (
    append_whole,
    first_line,
    in_bucket,
    is_there,
    is_transient,
    permission_hint,
    read_if_there,
    with_retries,
)


class Events:
    """The events of one run. Only the first process may write."""

    def __init__(self, run_dir: str | Path):
        self.path = local_path(run_dir) / "events.jsonl"

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append an event, synced to disk, or nothing. First cut off a half line that a kill left. Raise OSError if
        that is impossible."""
        whole = len(self._whole_lines())
        if whole < len(read_if_there(self.path)):
            os.truncate(self.path, whole)
        line = json.dumps({"event": event, "step": step, **facts, "time": time.time()}) + "\n"
        append_whole(self.path, line)

    def read(self) -> list[dict]:
        """Return all events, except a half line at the end. Skip and report any other line that cannot be read: a
        checkpoint has itself the position in the data at which the run continues."""
        events = []
        for number, line in enumerate(self._whole_lines().splitlines(), 1):
            try:
                event = json.loads(line)
                _ = event["event"], event["step"] + 0
                events.append(event)
            except (ValueError, TypeError, LookupError):
                _report_once(f"{self.path}: line {number} is damaged, and skipped")
        return events

    def _whole_lines(self) -> bytes:
        text = read_if_there(self.path)
        return text[: text.rfind(b"\n") + 1]


@cache
def _report_once(message: str) -> None:
    """Print a message once in this process: a start reads its record several times."""
    print(message, file=sys.stderr)


def saved_up_to(events: list[dict]) -> int:
    """Return the newest step that was ever saved, by these events; 0 if none."""
    return max((event["step"] for event in events if event["event"] in ("saved", "start")), default=0)


def batch_of(events: list[dict], step: int, tokens_per_step: int) -> tuple[int, int]:
    """Return the tokens of the data's sequence before the batch that follows `step` steps, and the tokens of that
    batch. `tokens_per_step` applies if no start is recorded."""
    first = tokens = 0
    for event in events:
        if event["event"] == "start" and event["step"] <= step and "tokens" in event:
            first, tokens, tokens_per_step = event["step"], event["tokens"], event["tokens_per_step"]
    return tokens + (step - first) * tokens_per_step, tokens_per_step


def read_metrics(run_dir: str | Path) -> list[dict]:
    """Return the lines of metrics.jsonl, none if there is no such file. Skip and report a damaged line, except an
    incomplete last one, which a kill may leave. Raise OSError if the disk does not answer."""
    path = local_path(run_dir) / "metrics.jsonl"
    texts = read_if_there(path).removesuffix(b"\n").split(b"\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            _ = line["step"] + 0, line["time"] + 0
            lines.append(line)
        except (ValueError, TypeError, LookupError):
            if number < len(texts):
                _report_once(f"{path}: line {number} is damaged, and skipped")
    return lines


def finite(value: Any) -> Any:
    """Return the value for JSON, with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scores(run_dir: str | Path, name: str = "val_bpb") -> dict[int, float]:
    """Return `val_bpb`, or another figure, of each step that has it, if finite."""
    return {line["step"]: figure for line in read_metrics(run_dir) if (figure := line.get(name)) is not None}


def storage_path(folder: str | Path) -> epath.Path:
    """Return a folder's path, on a disk or in a bucket (`gs://`)."""
    if not in_bucket(folder):
        return epath.Path(Path(folder).expanduser().resolve())
    # Other processes and tensorstore write to the bucket: a cached listing may be out of date.
    fsspec.config.conf["gcs"] = {**fsspec.config.conf.get("gcs", {}), "use_listings_cache": False}
    return epath.Path(folder)


@cache
def _copies() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tokensum-")


def local_path(run_dir: str | Path) -> Path:
    """Return the folder on this machine with a run's record: the run's own, or this process's copy of one in a
    bucket, deleted with the process."""
    if not in_bucket(run_dir):
        return Path(run_dir).expanduser()
    source = storage_path(run_dir)
    return Path(_copies().name) / sha256(str(source).encode()).hexdigest()[:16] / source.name


TAKEN: set[str] = set()
"""Runs in buckets that this process has taken over. A process deletes its lock when it ends."""


@cache
def line_of_lock() -> str:
    """Return the line of this process for the lock of a run's folder. It is the same at each call: containers may share
    a host's name and a process's number, but not the time."""
    return f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"


def is_of_this_process(line: str) -> bool:
    """Return whether a line of a lock is this process's."""
    return line == line_of_lock().rstrip("\n")


def lock_holder(run_dir: str | Path) -> str:
    """Return the line of the process that last took the lock of the run's folder; empty without any."""
    folder = storage_path(run_dir) if in_bucket(run_dir) else local_path(run_dir)
    return read_if_there(folder / "lock").decode().partition("\n")[0]


def other_writer(run_dir: str | Path) -> str:
    """Return who took the lock of the run's folder after this process did, if anybody: a bucket has no locks, and some
    disks lock for each machine alone (NFS with local_lock, Lustre with localflock)."""
    holder = lock_holder(run_dir)
    if is_of_this_process(holder):
        return ""
    if not holder and str(run_dir) in TAKEN:
        return "a process that has ended"
    return holder


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


UPLOADED: dict[Path, tuple[int, int]] = {}
"""Size and time of each file that this process has fetched or uploaded."""
UPLOADING = threading.Lock()


def upload(run_dir: str | Path) -> None:
    """Copy what changed in the record of a run in a bucket there, and delete what is gone; do nothing for a run on a
    disk. Only the first process may call it. A second thread waits: a save may upload while a failure is recorded.
    Raise UserError if another process has taken the run over."""
    if in_bucket(run_dir):
        if holder := with_retries(str(run_dir), lambda: other_writer(run_dir)):
            raise UserError(f"{run_dir} is being written to by another process, too ({holder})")
        with UPLOADING:
            with_retries(str(run_dir), lambda: _upload(run_dir))


def _upload(run_dir: str | Path) -> None:
    local, target = local_path(run_dir), storage_path(run_dir)
    files = [path for path in sorted(local.rglob("*")) if path.is_file() and path.suffix != ".partial"]
    board = local / "tensorboard"
    if board.exists() and not any(path.is_relative_to(board) for path in list(UPLOADED)):
        old = target / board.name
        if old.exists():
            old.rmtree()  # from another process: each writes all lines again, under other names
    present: dict[Path, tuple[int, int]] = {}
    for path in files:
        with suppress(FileNotFoundError):  # deleted meanwhile
            about = path.stat()
            present[path] = (about.st_size, about.st_mtime_ns)
    for path, size_and_time in present.items():
        if size_and_time != UPLOADED.get(path):
            (target / path.relative_to(local)).write_bytes(path.read_bytes())
            UPLOADED[path] = size_and_time
    for path in [path for path in list(UPLOADED) if path.is_relative_to(local) and path not in present]:
        (target / path.relative_to(local)).unlink(missing_ok=True)
        del UPLOADED[path]


@cache
def fetch_locally(folder: str | Path) -> Path:
    """Return a folder on this machine with a run's record; for a run in a bucket, a copy of now. Checkpoints stay in
    the bucket. Raise UserError if nothing is there."""
    local, source = local_path(folder), storage_path(folder)
    if not in_bucket(folder):
        return local
    with reading(str(folder)):
        with_retries(str(folder), lambda: _fetch(source, local))
    if not (local / "config.json").exists():
        raise UserError(f"{folder} holds no run (no config.json)")
    return local


def fetch_record(run_dir: str | Path) -> None:
    """Fill this process's copy of the record of a run in a bucket, if there is one."""
    if in_bucket(run_dir):
        with reading(f"--run_dir={run_dir}"):
            _fetch(storage_path(run_dir), local_path(run_dir))


def _fetch(source: epath.Path, local: Path) -> None:
    """Copy the files of a folder in a bucket, and of its folder of the tokenizer."""
    local.mkdir(parents=True, exist_ok=True)
    for folder in (source, source / "tokenizer") if source.exists() else ():
        for path in folder.iterdir() if folder.exists() else ():
            # gcsfs lists the placeholder of a folder, which Cloud Console makes, as a file in it.
            if path.name != "lock" and is_there(path) and not path.is_dir():
                copy = local / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(path.read_bytes())
                about = copy.stat()
                UPLOADED[copy] = (about.st_size, about.st_mtime_ns)


ACTIVITIES: tuple[str, ...] = ("start", "compile", "restore", "steps", "evaluation", "saves")


class Times:
    """Seconds of this process by activity. They sum to the time since this object was made."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self.activity, self.since = "start", time.monotonic()

    def enter(self, activity: str) -> str:
        """Count seconds from now on as this activity's. Return the activity before."""
        now, before = time.monotonic(), self.activity
        self.seconds[before] += now - self.since
        self.activity, self.since = activity, now
        return before

    def so_far(self) -> dict[str, float]:
        """Return the seconds of each activity until now."""
        self.enter(self.activity)
        return {activity: round(seconds, 3) for activity, seconds in self.seconds.items()}

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Count the time inside as this activity's."""
        before = self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)


def seconds_by_activity(events: list[dict]) -> dict[str, float]:
    """Return the seconds of a run's processes, summed over their events `stop`; a killed process has none."""
    stops = [event.get("seconds", {}) for event in events if event["event"] == "stop"]
    return {activity: round(sum(stop.get(activity, 0.0) for stop in stops), 1) for activity in ACTIVITIES}
