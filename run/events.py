"""events.jsonl: what happened to a run, a line each, appended and never rewritten.

`begun` (a process that is about to compile and restore), `start` (from which step, at how many tokens of the data, with
how many a step or which ramp; the code's hash, versions, devices and mesh), `running` (at which step; each minute),
`saved` (a checkpoint that is whole), `rollback` (to which checkpoint, and at how many tokens of the data it continues),
`stop` (after which step, with which exit code). A run whose checkpoints have gone is known by it, the batch that each
step saw, and where the time went: `start`, `running` and `stop` carry when their process began, and its seconds by what
they went to (run/goodput.py).
"""

import json
import os
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
        in_bucket = str(run_dir).startswith("gs://")  # a copy, which is only read
        self.path: Any = (epath.Path(run_dir) if in_bucket else Path(run_dir)) / "events.jsonl"

    def add(self, event: str, step: int, **facts: Any) -> None:
        """Append one, on disk for certain, or not at all; a half line that a kill left is cut off before. OSError
        where that is impossible."""
        if self.path.exists() and self.path.stat().st_size > (whole := len(self._whole_lines())):
            os.truncate(self.path, whole)
        line = json.dumps({"event": event, "step": step, **facts, "time": time.time()}) + "\n"
        append_whole(self.path, line)

    def read(self) -> list[dict]:
        """All of them, but for a half line at the end. UserError for any other line that cannot be read."""
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
    """Return the newest step that was ever saved, by these events; 0: none."""
    return max((event["step"] for event in events if event["event"] in ("saved", "start")), default=0)


def another_went_on(mine: list[dict], copied: list[dict]) -> bool:
    """Whether another machine has gone on from the copy of this one's events. UserError if both have saved what the
    other has not."""
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
    """Count the processes that have begun from the checkpoint `newest`, the newest there is, since it was saved, a
    person stopped the run, or it was given up."""
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
    """Tokens of the data's sequence before the batch that is trained on after `step` steps, and tokens of that batch.
    `ramp` holds where no start is on record."""
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
