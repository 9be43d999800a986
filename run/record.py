"""A run's record: the lines of its events.jsonl and metrics.jsonl, and the copy of its folder in `checkpoint.folder`.
Without JAX.

Events are never rewritten; a resumed run drops metrics after its checkpoint (run/metrics.py). Another machine resumes
from the copy, and any machine can read it: a run in a bucket needs no other disk. Checkpoints are not part of it.

`begun`: a process is about to compile and restore. `fitted`: the options that `batch.rows_per_device=auto` chose.
`start`: the step, the tokens before it, tokens per step, the code's hash, versions, devices and mesh. `saved`: a
complete checkpoint. `went_back`: the older checkpoint of `--resume_step`. `out_of_memory`: the step before, and the
rows that the run continues with. `stop`: the last step, the exit code, and the process's seconds by activity
(run/times.py). Events identify a run whose checkpoints are gone, and the batch that each step saw.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec.config
from etils import epath

from configs.command_line import Exit
from configs.files import append_whole
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


class Events:
    """The events of one run. Only the first process may write."""

    def __init__(self, run_dir: str | Path):
        in_bucket = str(run_dir).startswith("gs://")  # a copy, only read
        self.path: Any = (epath.Path(run_dir) if in_bucket else Path(run_dir)) / "events.jsonl"

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append an event, synced to disk, or nothing. First cut off a half line that a kill left. Raise OSError if
        that is impossible."""
        if self.path.exists() and self.path.stat().st_size > (whole := len(self._whole_lines())):
            os.truncate(self.path, whole)
        line = json.dumps({"event": event, "step": step, **facts, "time": time.time()}) + "\n"
        append_whole(self.path, line)

    def read(self) -> list[dict]:
        """Return all events, except a half line at the end. Raise UserError for any other line that cannot be read."""
        events = []
        for number, line in enumerate(self._whole_lines().splitlines(), 1):
            try:
                events.append(json.loads(line))
                _ = events[-1]["event"], int(events[-1]["step"])
            except (ValueError, TypeError, LookupError) as error:
                raise UserError(
                    f"{self.path}: line {number} is damaged, and may say at which batch the run continues; restore the "
                    "file, or delete that line if the batch's size never changed"
                ) from error
        return events

    def _whole_lines(self) -> bytes:
        text = self.path.read_bytes() if self.path.exists() else b""
        return text[: text.rfind(b"\n") + 1]


def saved_up_to(events: list[dict]) -> int:
    """Return the newest step that was ever saved, by these events; 0 if none."""
    return max((event["step"] for event in events if event["event"] in ("saved", "start")), default=0)


def another_went_on(mine: list[dict], copied: list[dict]) -> bool:
    """Return whether another machine continued from the copy of this one's events. Raise UserError if each has saved a
    step that the other has not."""
    common = next((i for i, (one, other) in enumerate(zip(mine, copied)) if one != other), min(len(mine), len(copied)))
    begins = [event["step"] for event in copied[common:] if event["event"] == "start"]
    if not begins:
        return False
    if (here := max((event["step"] for event in mine[common:] if event["event"] == "saved"), default=0)) > begins[0]:
        raise UserError(
            f"two machines have continued this run: this one up to step {here}, another one from step {begins[0]} on; "
            "delete this machine's run folder to follow the other one, or give another --checkpoint.folder"
        )
    return True


def starts_in_vain(events: list[dict], newest: int) -> int:
    """Count the processes that began from the newest checkpoint `newest`, since it was saved, a person stopped the run,
    or it was given up."""
    count, again = 0, [code for code in Exit if code.start_again]
    for event in reversed(events):
        if event["event"] == "stop" and event.get("code") not in again:
            break
        if event["event"] == "begun":
            if event["step"] != newest:
                break
            count += 1
    return count


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
    incomplete last one, which a kill may leave."""
    path = Path(run_dir) / "metrics.jsonl"
    texts = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            _ = line["step"] + 0, line["time"] + 0
            lines.append(line)
        except (ValueError, TypeError, LookupError):
            if number < len(texts):
                print(f"{path}: line {number} is damaged, and skipped", file=sys.stderr)
    return lines


def finite(value: Any, instead: Callable[[float], Any] = lambda number: None) -> Any:
    """Return the value for JSON, with None or another value `instead` of each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(part, instead) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part, instead) for part in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def scores(run_dir: str | Path, name: str = "val_bpb") -> dict[int, float]:
    """Return `val_bpb`, or another figure, of each step that has it, if finite."""
    return {line["step"]: figure for line in read_metrics(run_dir) if (figure := line.get(name)) is not None}


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
