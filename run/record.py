"""A run's record: its folder without checkpoints, and the copy in `checkpoint.folder`.

Another machine resumes from the copy, and any machine can read it: a run in a bucket needs no other disk.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import fsspec.config
from etils import epath

from configs.retry import StorageLost, first_line, passes, patiently, role
from configs.schema import UserError

# Events come last, in both directions: they show a start whether the copy is newer.
CONTINUES = (
    "config.json",
    "metrics.jsonl",
    "tokenizer/tokens.json",
    "tokenizer/tokenizer.json",
    "loss.png",
    "summary.json",
    "events.jsonl",
)


def place(folder: str | Path) -> epath.Path:
    """Return a folder's path, on a disk or in a bucket (`gs://`)."""
    if not str(folder).startswith("gs://"):
        return epath.Path(Path(folder).resolve())
    # Other processes and tensorstore write to the bucket: a cached listing may be out of date.
    fsspec.config.conf["gcs"] = {**fsspec.config.conf.get("gcs", {}), "use_listings_cache": False}
    return epath.Path(folder)


def copy(source: epath.Path, target: epath.Path) -> None:
    """Copy a small file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if str(target).startswith("gs://"):  # objects appear atomically
        target.write_bytes(source.read_bytes())
        return
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(source.read_bytes())
    partial.replace(target)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error of a store into a UserError that names `what`, unless it may pass."""
    try:
        yield
    except (UserError, StorageLost):
        raise
    except Exception as error:
        if passes(error):
            raise
        raise UserError(f"{what} cannot be read: {first_line(error)}{role(error)}") from error


class Record:
    """The record in `run_dir`, and its copy in `elsewhere` (empty: none). Only for the first process."""

    def __init__(self, run_dir: str | Path, elsewhere: str = ""):
        self.run_dir, self.elsewhere = Path(run_dir), elsewhere
        self.copied: dict[str, tuple[int, int]] = {}
        """Size and time of the files that this process has copied."""

    def copy(self) -> None:
        """Copy files that changed since the last time, and delete those that are gone. Copy TensorBoard's files too."""
        if not self.elsewhere:
            return
        target = place(self.elsewhere)
        board = sorted(path for path in (self.run_dir / "tensorboard").rglob("*") if path.is_file())
        known = any(name.startswith("tensorboard/") for name in self.copied)
        if board and not known and (old := target / "tensorboard").exists():
            old.rmtree()  # from another process: each writes all lines again, under other names
        present = {}
        for name in [*(str(path.relative_to(self.run_dir)) for path in board), *CONTINUES]:
            with suppress(FileNotFoundError):
                about = (self.run_dir / name).stat()
                present[name] = (about.st_size, about.st_mtime_ns)
                if present[name] != self.copied.get(name):
                    copy(epath.Path(self.run_dir / name), target / name)
        for name in self.copied.keys() - present.keys():
            (target / name).unlink(missing_ok=True)
        self.copied = present

    def copy_events(self) -> None:
        """Copy only events.jsonl: it shows that this machine was alive until now. If that fails, the next copy repeats
        it, and a save reports why."""
        if self.elsewhere:
            with suppress(Exception):
                copy(epath.Path(self.run_dir / "events.jsonl"), place(self.elsewhere) / "events.jsonl")

    def fetch(self) -> None:
        """Replace the record in `run_dir` by the copy."""
        source = place(self.elsewhere)
        for name in CONTINUES:
            if (source / name).exists():
                copy(source / name, epath.Path(self.run_dir / name))


@cache
def _copies() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tokensum-")


def at_hand(folder: str | Path) -> Path:
    """Return a folder on this machine with a run's record, or with a network that export.py wrote. For one in a bucket,
    each call makes a copy of the record, deleted with this process; checkpoints are read from the bucket. Raise
    UserError if nothing is there."""
    if not str(folder).startswith("gs://"):
        return Path(folder).expanduser()
    source = place(folder)
    target = Path(_copies().name) / sha256(str(source).encode()).hexdigest()[:16] / source.name

    def fetch() -> None:
        inner = source / "tokenizer"
        for path in [*source.iterdir(), *(inner.iterdir() if inner.exists() else ())]:
            if not path.is_dir():
                copy(path, epath.Path(target / path.relative_to(source)))

    with reading(str(folder)):
        patiently(str(folder), lambda: fetch() if source.exists() else None)
    record = target / "config.json"
    if not record.exists() and not any(target.glob("*.safetensors")):
        raise UserError(f"{folder} holds no run (no config.json) and no network (no *.safetensors)")
    if record.exists() and "config" in (facts := json.loads(record.read_text())):
        facts["config"].setdefault("checkpoint", {})["folder"] = str(folder)
        record.write_text(json.dumps(facts))
    return target
