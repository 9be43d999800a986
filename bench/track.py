"""Tell whether an idea helps, at a fixed budget of tokens: python -m bench.track --optimizer.muon.peak_rate=0.03

The text, its tokenizer, the held-out part, the tokens of a run and the seeds are fixed by a config. An idea is a change
of the code, or of options of model.* and optimizer.*, which the result names. Options that change only speed are free.
train.py makes a run for each seed, and the same command continues there. One line of JSON has the means over seeds, and
their difference from the reference in bench/track.jsonl (docs/track.md).
"""

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scipy.stats import t  # JAX depends on SciPy

from bench.recipes import made_with, run_programs
from configs.command_line import parse
from configs.files import write_whole
from configs.schema import Config, FilePath, Positive, UserError, free_to_change, options
from hosts.runtime import run_command, versions
from run.folder import record_of
from run.record import Events, scores

CONFIGS = {"tiny": "configs/track.py", "d12": "configs/track_d12.py"}
REFERENCE = Path(__file__).with_suffix(".jsonl")
POWERCAP = Path("/sys/class/powercap")
SAME = ("size", "text", "recipe")  # what two comparable results have in common
Figures = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The track."""

    size: Literal["tiny", "d12"] = "tiny"
    """`tiny`: the Python standard library, for two CPU cores. `d12`: ClimbMix, for an accelerator."""
    seeds: Positive[int] = 5
    """Runs, with the seeds 0, 1, ..."""
    out: FilePath = "runs/track"
    """Folder of the runs. Those of the same code, options and versions are not repeated."""
    write_reference: bool = False
    """Make the result the reference of its size and text, in bench/track.jsonl."""


def is_idea(name: str) -> bool:
    """Return whether an option may change what a run learns, and leaves its result comparable."""
    return name.startswith(("model.", "optimizer.")) and name != "model.vocab_size" and not free_to_change(name)


def is_fixed(name: str) -> bool:
    """Return whether results with different values of an option are not comparable, or the track sets it."""
    speed = free_to_change(name) and not name.startswith(("name", "run_dir", "resume", "data.", "eval."))
    return not speed and not is_idea(name)


def changes_of(config: Config, base: Config) -> dict[str, object]:
    """Return the options of `config` that differ from the track's. Raise UserError if the track fixes one of them."""
    track = options(base)
    changes = {name: value for name, value in options(config).items() if value != track[name]}
    if fixed := [f"--{name}={value} (the track's: {track[name]})" for name, value in changes.items() if is_fixed(name)]:
        raise UserError(
            f"{', '.join(fixed)}: the result would not be comparable; change options of model.* (but vocab_size) and "
            "optimizer.*, those of speed, or the code"
        )
    return changes


def recipe_of(base: Config) -> str:
    """Return a digest of all that the track fixes, except the text."""
    fixed = {name: value for name, value in options(base).items() if is_fixed(name)}
    return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()[:12]


def energy() -> dict[str, tuple[float, float]]:
    """Return the joules used so far by each GPU (NVML), or by each CPU package (RAPL), and the value at which its
    counter starts again. It is empty if none can be read."""
    with suppress(ImportError):
        import pynvml  # pyright: ignore[reportMissingImports]

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            used = [pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3 for gpu in gpus]
            return {f"gpu {i}": (joules, math.inf) for i, joules in enumerate(used)}
    read = lambda zone, name: float((zone / name).read_text()) / 1e6
    with suppress(OSError):
        zones = [zone for zone in POWERCAP.glob("intel-rapl:?") if (zone / "name").read_text().startswith("package")]
        return {zone.name: (read(zone, "energy_uj"), read(zone, "max_energy_range_uj")) for zone in zones}
    return {}


def joules_between(before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]) -> float | None:
    """Return the joules between two readings, of all devices; None if there is no counter. A counter may have started
    again once."""
    return sum((after[name][0] - used) % most for name, (used, most) in before.items()) if before else None


def train(command: Sequence[str], run_dir: Path) -> Figures:
    """Return the figures of a run, which is made unless it is complete. Exit with train.py's code if it fails."""
    complete = run_dir.with_suffix(".json")
    if not complete.exists():
        before = {} if run_dir.exists() else energy()
        # stdout is for the result.
        if code := run_programs([[*command, f"--run_dir={run_dir}"]], [sys.stderr])[0]:
            sys.exit(code)
        write_whole(complete, json.dumps({"joules": joules_between(before, energy())}))
    summary, (record, config) = json.loads((run_dir / "summary.json").read_text()), record_of(run_dir)
    start = [event for event in Events(run_dir).read() if event["event"] == "start"][-1]
    bits = scores(run_dir)
    return {
        **{"loss": summary["val_loss"], "bits_per_byte": bits[config.steps], "seconds": summary["seconds"]},
        **json.loads(complete.read_text()),
        **{"by_step": bits, "text": record["dataset"], "device": start["devices"], "code_hash": start["code_hash"]},
    }


def line_of(runs: Sequence[Figures]) -> Figures:
    """Return the means over runs, and what they share. Raise UserError if their texts or codes differ."""
    for name in ("text", "code_hash"):
        if len(values := {run[name] for run in runs}) > 1:
            raise UserError(f"{name} changed between the runs ({', '.join(sorted(values))}): give another --out")

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None

    return {
        **{name: mean([run[name] for run in runs]) for name in ("loss", "bits_per_byte", "seconds", "joules")},
        "bits_per_byte_of_seeds": [run["bits_per_byte"] for run in runs],
        "bits_per_byte_of_steps": {step: mean([run["by_step"][step] for run in runs]) for step in runs[0]["by_step"]},
        **{name: runs[0][name] for name in ("text", "device", "code_hash")},
    }


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    """Return the difference of the means of two samples, ours less theirs, with its standard error, its interval of 95%
    and a verdict. It is Student's t for unpaired samples of equal variance, which both together estimate. So one run of
    ours has an interval too."""
    freedom = len(ours) + len(theirs) - 2
    variance = sum(len(side) * statistics.pvariance(side) for side in (ours, theirs)) / freedom
    error = math.sqrt(variance * (1 / len(ours) + 1 / len(theirs)))
    difference, reach = statistics.fmean(ours) - statistics.fmean(theirs), float(t.ppf(0.975, freedom)) * error
    low, high = difference - reach, difference + reach
    verdict = "better" if high < 0 else "worse" if low > 0 else "cannot tell"
    return {"verdict": verdict, "difference": difference, "standard_error": error, "interval": [low, high]}


def judged(line: Figures, references: Sequence[Figures]) -> Figures:
    """Return the comparison with the reference of the same size, text and recipe. Without one there is no verdict."""
    for reference in references:
        if all(reference[name] == line[name] for name in SAME):
            figures = compared(line["bits_per_byte_of_seeds"], reference["bits_per_byte_of_seeds"])
            return figures | {"reference": reference["code_hash"]}
    there = "; ".join(" ".join(f"{name} {reference[name]}" for name in SAME) for reference in references)
    why = f"bench/track.jsonl has {there or 'nothing'}; make a reference of the unchanged code with --write_reference"
    return {"verdict": "not comparable", "why": why}


def main() -> int:
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--size", default="tiny")
    known.add_argument("--config")
    given, _ = known.parse_known_args()
    if given.config:
        raise UserError(f"--config={given.config}: the track has its own; --size is one of {', '.join(CONFIGS)}")
    path = CONFIGS.get(given.size, CONFIGS["tiny"])  # tyro refuses an unknown size
    config, arguments = parse(__doc__, Arguments, [f"--config={path}", *sys.argv[1:]])
    base, _ = parse(None, argv=[f"--config={path}"])
    changes = changes_of(config, base)
    ideas = {name: value for name, value in changes.items() if is_idea(name)}
    if arguments.write_reference and (ideas or arguments.seeds < 2):
        raise UserError(f"--write_reference: a reference has no changed option ({ideas}), and two seeds or more")
    command = ["train.py", f"--config={path}", *(f"--{name}={value}" for name, value in changes.items())]
    folder = Path(arguments.out) / f"{arguments.size}-{made_with(changes)}"
    runs = [train([*command, f"--seed={seed}"], folder / str(seed)) for seed in range(arguments.seeds)]
    facts = {"recipe": recipe_of(base), "changed": ideas, "versions": versions()}
    line = {"size": arguments.size, "seeds": arguments.seeds, **line_of(runs), **facts}
    references = [json.loads(text) for text in REFERENCE.read_text().splitlines()] if REFERENCE.exists() else []
    if arguments.write_reference:
        others = [other for other in references if any(other[name] != line[name] for name in SAME)]
        write_whole(REFERENCE, *(json.dumps(each) + "\n" for each in [*others, line]))
        references = [*others, line]
    print(json.dumps(line | judged(line, references)))
    return 0


if __name__ == "__main__":
    run_command(main)
