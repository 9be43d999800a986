"""Runs beside each other: what differs in how they were made, and what a person should know of how they compare."""

import json
from itertools import pairwise
from statistics import median
from typing import Any

from tools.report.runs import Run, flat
from tools.report.sentences import Sentence, counted, percent, quantity

OWN = ("name", "run_dir", "checkpoint.folder")  # options that every run has for itself


def compared(runs: list[Run]) -> list[Sentence]:
    """What a person should know of several runs beside each other."""
    if len(runs) < 2:
        return []
    differing = differences(runs)
    names = [name for name in differing if any(name in run.options for run in runs)]
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    said = [Sentence(f"They differ in {counted(len(names), 'option')}: {listed}." if names else "No option differs.")]
    text, sizes = "dataset (fingerprint)" in differing, "model.vocab_size" in differing
    if text or sizes or "eval.tokens" in differing:
        what = "texts" if text else "vocabularies" if sizes else "amounts of held-out text"
        said.append(Sentence(f"Their losses are of different {what}, and cannot be compared as they are.", True))
    else:
        said += _losses(runs)
    if all(rates := [run.course("tokens_per_second").values for run in runs]):
        shown = sorted(((median(rate), run.name) for rate, run in zip(rates, runs)), reverse=True)
        (rate, name), *rest = shown
        others = "".join(f", {other} on {quantity(slower)}" for slower, other in rest)
        said.append(Sentence(f"{name} trains on {quantity(rate)} tokens a second{others}."))
    return said


def _losses(runs: list[Run]) -> list[Sentence]:
    """At the same tokens, and how soon the best run is where the others end."""
    vals = {run.name: _by_tokens(run) for run in runs}
    most = min((val[-1][0] if val else 0 for val in vals.values()), default=0)
    if not most:
        return []
    said = []
    at_most = sorted((_interpolated(val, most), name) for name, val in vals.items())
    best = at_most[0][0]
    others = ", ".join(f"{name} at {loss:.3f} (+{loss - best:.3f})" for loss, name in at_most[1:])
    where = f"At {quantity(most)} tokens, the most that all were trained on and evaluated at"
    said.append(Sentence(f"{where}, {at_most[0][1]} has the lowest validation loss, {best:.3f}; {others}."))
    winner = vals[at_most[0][1]]
    for _, name in at_most[1:]:
        goal = vals[name][-1]
        reached = _first_reach(winner, goal[1])
        if reached is not None and 0 < reached < goal[0]:
            share = f"{percent(reached / goal[0])} of its tokens"
            said.append(Sentence(f"{at_most[0][1]} reaches the last validation loss of {name} after {share}."))
    return said


def _by_tokens(run: Run) -> list[tuple[float, float]]:
    val = run.course("val_loss")
    return list(zip(run.along("tokens", val.steps), val.values))


def _interpolated(points: list[tuple[float, float]], where: float) -> float:
    for (left, before), (right, after) in pairwise(points):
        if left <= where <= right and right > left:
            return before + (after - before) * (where - left) / (right - left)
    return points[-1][1]


def _first_reach(points: list[tuple[float, float]], goal: float) -> float | None:
    for (left, before), (right, after) in pairwise(points):
        if before > goal >= after:
            return left + (right - left) * (before - goal) / (before - after)
    return None


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """Each option that is not the same in all runs, with each run's value; an empty one where a run's version did not
    know it. What was trained on, and with what, is told in the same way."""
    facts = [_comparable(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = {name: [each.get(name, "") for each in facts] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _comparable(run: Run) -> dict[str, str]:
    devices = flat(run.record.get("devices") or {}, "devices: ")
    versions = flat(run.record.get("versions") or {}, "version of ")
    facts = run.options | {"dataset (fingerprint)": run.record.get("dataset")} | devices | versions
    return {name: _shown(value) for name, value in facts.items() if name not in OWN}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
