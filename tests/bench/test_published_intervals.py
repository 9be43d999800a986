"""Test that docs/recipe.md's differences are what bench.compare computes from the raw figures in bench/LOG.md."""

import re
from pathlib import Path

import pytest

from bench.compare import LEVEL, Comparison, compare, holm

ROOT = Path(__file__).parents[2]
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
    """Return a comparison as the page shows it."""
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


@pytest.mark.parametrize("text, label", [("standard library", "Python's standard library"), ("Django", "Django's")])
def test_the_difference_from_nanochat_follows_from_the_raw_figures(text, label):
    raw = raw_figures()
    of = compare(SMALL, NANOCHAT, raw[text, SMALL], raw[text, NANOCHAT])
    rows = table_of("## Against nanochat's own code")
    shown = next(cells for row, cells in rows.items() if row.startswith(label))[-1]
    assert shown == f"{of.difference:+.4f} [{of.interval[0]:+.4f}, {of.interval[1]:+.4f}]"


def candidates(text: str) -> dict[str, dict[int, float]]:
    """Return the bits per byte by seed of each newer candidate of size A, by its name."""
    log = (ROOT / "bench/LOG.md").read_text()
    rows = re.findall(rf"^\| A \| {text} \| (.*?) \| (\d: .*) \|$", log, re.MULTILINE)
    pairs = {run: [pair.split(": ") for pair in figures.split(", ")] for run, figures in rows}
    return {run: {int(seed): float(bits) for seed, bits in of} for run, of in pairs.items()}


@pytest.mark.parametrize("text, column", [("standard library", 0), ("Django", 1)])
def test_every_candidate_is_shown_as_its_runs_say(text, column):
    """With its interval if it has two pairs or more."""
    runs = candidates(text)
    ours = runs.pop(f"`{SMALL}`")
    seeds = {run: sorted(bits.keys() & ours.keys()) for run, bits in runs.items()}
    several = [run for run in runs if len(seeds[run]) > 1]
    paired = lambda bits, run: [bits[seed] for seed in seeds[run]]
    compared = [compare(run, SMALL, paired(runs[run], run), paired(ours, run)) for run in several]
    corrected = holm([of.p for of in compared])
    expected = {run: f"{runs[run][seeds[run][0]] - ours[seeds[run][0]]:+.4f}" for run in runs}
    expected |= {of.recipe: f"{as_cell(of, p)} ({len(of.by_seed)})" for of, p in zip(compared, corrected)}
    assert {run: cells[column] for run, cells in table_of("## Newer candidates").items()} == expected
