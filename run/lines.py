"""Read and append the lines of a run's events.jsonl, and read those of metrics.jsonl, without JAX.

Both are appended to. Events are never rewritten; a resumed run drops metrics after its checkpoint (run/metrics.py).

`begun`: a process is about to compile and restore. `fitted`: the options that `batch.rows_per_device=auto` chose.
`start`: the step, the tokens of the data before it, tokens per step or the ramp, the code's hash, versions, devices and
mesh. `running`: the step, each minute. `saved`: a complete checkpoint. `rollback`: the checkpoint, and the tokens of
the data at which it continues. `out_of_memory`: the step before, and the rows that the run continues with. `stop`: the
last step and the exit code. Events identify a run whose checkpoints are gone, the batch that each step saw, and the use
of time: `start`, `running` and `stop` have their process's start time, and its seconds by activity (run/goodput.py).
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from etils import epath

from configs.exit_codes import Exit
from configs.files import append_whole
from configs.ramp import Ramp
from configs.schema import UserError


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
                    "file, or delete that line if the run was never rolled back"
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


def batch_of(events: list[dict], step: int, ramp: Ramp) -> tuple[int, int]:
    """Return the tokens of the data's sequence before the batch that follows `step` steps, and the tokens of that
    batch. `ramp` applies if no start is recorded."""
    first = position = 0
    for event in events:
        if event["event"] == "start" and event["step"] <= step and "position" in event:
            ramp = Ramp.read(event.get("ramp", ""), event["tokens_per_step"])
            first, position = event["step"], event["position"]
    return position + ramp.tokens(step) - ramp.tokens(first), ramp.stage(step).tokens_per_step


def rollbacks_to(events: list[dict], step: int) -> list[dict]:
    """Return the rollbacks to the checkpoint of `step`, since it was last saved."""
    rollbacks: list[dict] = []
    for event in events:
        if event["step"] == step and event["event"] == "saved":
            rollbacks = []
        elif event["step"] == step and event["event"] == "rollback":
            rollbacks.append(event)
    return rollbacks


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


def scores(run_dir: str | Path, name: str = "val_bpb") -> dict[int, float]:
    """Return `val_bpb`, or another figure, of each step that has it, if finite."""
    return {line["step"]: figure for line in read_metrics(run_dir) if (figure := line.get(name)) is not None}


def of_average(figures: dict) -> str:
    """Return the bits per byte of the parameters' average in words; empty if they were not measured."""
    bits = figures.get("average_val_bpb")
    return "" if bits is None else f"; with the average of the parameters {bits:.4f}"
