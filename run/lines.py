"""Reading metrics.jsonl, without JAX, for commands that only look at a run."""

import json
import sys
from pathlib import Path


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
