"""Test that docs/recipe.md's differences are what bench.compare computes from the raw figures in bench/LOG.md."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench.compare import LEVEL, Comparison, compare, holm

ROOT = Path(__file__).parents[2]
TEXTS = [("standard library", "Python's standard library"), ("Django", "Django's documentation")]
RAW = re.compile(r"\| (standard library|Django) \| (.*?) \| ([\d.]+) ([\d.]+) ([\d.]+) \|")
SMALL, PLAIN = "configs/small.py", "configs/plain.py"
NANOCHAT = "bench.nanochat --config=configs/small.py --device=cuda"
LEFT_OUT = {
    "Muon (AdamW instead)": "--optimizer.matrices.kind=adamw",
    "`value_embeddings`": "--model.value_embeddings=False",
    "`backout`": "--model.backout=False",
    "`x0_lambdas`": "--model.x0_lambdas=False",
    "`window_pattern`": "--model.window_pattern=L",
    "`smear`": "--model.smear=False",
    "`resid_lambdas`": "--model.resid_lambdas=False",
    "`qk_scale`": "--model.qk_scale=1.0",
}
ADDED = {
    "`value_embeddings`": "--model.value_embeddings",
    "Muon": "--optimizer.matrices.kind=muon",
    "`smear`": "--model.smear",
    "`window_pattern`": "--model.window_pattern=SSSL",
    "`qk_scale`": "--model.qk_scale=1.2",
    "`backout`": "--model.backout",
    "`resid_lambdas`": "--model.resid_lambdas",
    "`x0_lambdas`": "--model.x0_lambdas",
}
ADAMW = "AdamW, its best rate of three, 0.002"
INSTEAD = {
    "Muon's rate 0.04": "--optimizer.muon.peak_rate=0.04",
    ADAMW: "--optimizer.matrices.kind=adamw",
    "all rates x 0.5": "--optimizer.rate_factor=0.5",
    "all rates x 2": "--optimizer.rate_factor=2",
    "20 steps of warmup of all rates": "--optimizer.schedule.warmup_steps=20",
}


def raw_figures() -> dict[tuple[str, str], list[float]]:
    """Return the bits per byte of each run with three seeds, by text and recipe."""
    log = (ROOT / "bench/LOG.md").read_text()
    return {(text, run.replace("`", "")): [*map(float, bits)] for text, run, *bits in RAW.findall(log)}


def table_of(heading: str) -> dict[str, list[str]]:
    """Return the cells after the label of each row of the first table after `heading`."""
    page = (ROOT / "docs/recipe.md").read_text().split(heading)[1]
    rows = re.search(r"(\n\|.*)+", page)[0].strip().splitlines()[2:]
    split = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {label: cells for label, *cells in split}


def as_cell(of: Comparison, corrected: float) -> str:
    """Return a comparison as the page shows it: bold where the corrected p is significant."""
    bold = "**" if corrected <= LEVEL else ""
    return f"{bold}{of.difference:+.4f}{bold} [{of.interval[0]:+.4f}, {of.interval[1]:+.4f}]"


@pytest.mark.parametrize(
    "heading, first, changes, text, column",
    [
        ("**Each left out", SMALL, LEFT_OUT, "standard library", 0),
        ("**Each left out", SMALL, LEFT_OUT, "Django", 1),
        ("**Each added", PLAIN, ADDED, "standard library", 0),
        ("**Each added", PLAIN, ADDED, "Django", 1),
    ],
)
def test_every_difference_and_interval_follows_from_the_raw_figures(heading, first, changes, text, column):
    raw = raw_figures()
    rows = {label: run for label, options in changes.items() if (text, run := f"{first} {options}") in raw}
    compared = [compare(run, first, raw[text, run], raw[text, first]) for run in rows.values()]
    expected = dict(zip(rows, map(as_cell, compared, holm([of.p for of in compared]))))
    shown = {label: cells[column] for label, cells in table_of(heading).items() if cells[column]}
    assert shown == expected


def test_the_correction_of_optimizers_and_schedules_counts_all_that_were_tried():
    """Most of them are in bench/LOG.md alone: to correct for the page's rows only would find too many."""
    raw = {run: bits for (text, run), bits in raw_figures().items() if text == "standard library"}
    features = {f"{SMALL} {options}" for options in LEFT_OUT.values()} - {f"{SMALL} {INSTEAD[ADAMW]}"}
    tried = [run for run in raw if run not in features | {SMALL, NANOCHAT} and not run.startswith(PLAIN)]
    compared = [compare(run, SMALL, raw[run], raw[SMALL]) for run in tried]
    cells = dict(zip(tried, map(as_cell, compared, holm([of.p for of in compared]))))
    expected = {label: [cells[f"{SMALL} {options}"]] for label, options in INSTEAD.items()}
    assert len(tried) == 20 and table_of("**Optimizers and schedules**") == expected


def by_seed(size: str, text: str) -> dict[str, dict[int, float]]:
    """Return the bits per byte by seed of each run of bench/LOG.md's newer tables, by its name."""
    log = (ROOT / "bench/LOG.md").read_text()
    rows = re.findall(rf"^\| {size} \| {text} \| (.*?) \| (\d: .*) \|$", log, re.MULTILINE)
    pairs = {run: [pair.split(": ") for pair in figures.split(", ")] for run, figures in rows}
    return {run: {int(seed): float(bits) for seed, bits in of} for run, of in pairs.items()}


def compared_by_seed(run: str, theirs: dict[int, float], ours: dict[int, float]) -> Comparison:
    """Compare the runs of the seeds that both have."""
    seeds = sorted(theirs.keys() & ours.keys())
    return compare(run, SMALL, [theirs[seed] for seed in seeds], [ours[seed] for seed in seeds])


@pytest.mark.parametrize("text, column", [("standard library", 0), ("Django", 1)])
@pytest.mark.parametrize("size, heading", [("A", "## Newer candidates"), ("small", "**At `small.py`'s own size")])
def test_every_candidate_is_shown_as_its_runs_say(size, heading, text, column):
    """With its interval if it has two pairs or more."""
    runs = by_seed(size, text)
    ours = runs.pop(f"`{SMALL}`")
    single = {run: bits for run, bits in runs.items() if len(bits) == 1}
    compared = [compared_by_seed(run, bits, ours) for run, bits in runs.items() if run not in single]
    expected = {run: f"{bits[seed] - ours[seed]:+.4f}" for run, bits in single.items() for seed in bits}
    corrected = holm([of.p for of in compared])
    expected |= {of.recipe: f"{as_cell(of, p)} ({len(of.by_seed)})" for of, p in zip(compared, corrected)}
    assert {run: cells[column] for run, cells in table_of(heading).items()} == expected


@pytest.mark.parametrize("equal", ["tokens", "seconds"])
@pytest.mark.parametrize("text, label", TEXTS)
def test_the_difference_from_nanochat_follows_from_the_raw_figures(text, label, equal):
    ours, theirs = by_seed("small", text)[f"`{SMALL}`"], by_seed("nanochat", text)[f"equal {equal}"]
    of = compared_by_seed(SMALL, ours, theirs)
    mean_of_theirs, mean_of_ours = np.mean([*theirs.values()]), np.mean([*ours.values()])
    fewer = f"{-of.difference / mean_of_theirs:.1%}"
    difference = as_cell(of, corrected=1.0)
    shown = table_of("## Against nanochat's own code")[f"{label}, equal {equal}"]
    assert len(of.by_seed) == 5 and shown == [f"{mean_of_theirs:.4f}", f"{mean_of_ours:.4f}", difference, fewer]


@pytest.mark.parametrize("text, label", TEXTS)
def test_the_difference_from_nanochat_with_its_rule_follows_from_the_raw_figures(text, label):
    raw = raw_figures()
    of = compare(SMALL, NANOCHAT, raw[text, SMALL], raw[text, NANOCHAT])
    shown = table_of("**With its rule**")[label][-1]
    assert shown == as_cell(of, corrected=1.0)
