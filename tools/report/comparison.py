"""Compare runs: the differences of their options, and sentences about their results."""

import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from tools.report.runs import Run
from tools.report.sentences import Sentence, counted, percent, quantity

OWN = ("name", "run_dir", "checkpoint.folder")  # options whose difference says nothing


def compared(runs: list[Run]) -> list[Sentence]:
    """Return sentences that compare several runs."""
    differing = differences(runs)
    names = [name for name in differing if name in runs[0].options]
    listed = ", ".join(names[:6]) + ", ..." * (len(names) > 6)
    group = [Sentence(f"They differ in {counted(len(names), 'option')}: {listed}." if names else "No option differs.")]
    reasons = {
        "dataset (fingerprint)": "texts",
        "model.vocab_size": "vocabularies",
        "eval.tokens": "amounts of held-out text",
    }
    if what := next((what for name, what in reasons.items() if name in differing), ""):
        group.append(Sentence(f"Their losses are of different {what}, so they cannot be compared.", True))
    else:
        group += _losses(runs)
    if all(rates := [run.course("tokens_per_second").values for run in runs]):
        (rate, name), *rest = sorted(((median(rate), run.name) for rate, run in zip(rates, runs)), reverse=True)
        others = "".join(f", {other} on {quantity(slower)}" for slower, other in rest)
        group.append(Sentence(f"{name} trains on {quantity(rate)} tokens a second{others}."))
    return group


def _losses(runs: list[Run]) -> Iterator[Sentence]:
    """Yield sentences on losses at equal tokens, and on the tokens that the best run needs for the others' last
    loss."""
    points = {run.name: _by_tokens(run) for run in runs}
    most = min(course[-1][0] if course else 0 for course in points.values())
    if not most:
        return
    at = lambda course: float(np.interp(most, [tokens for tokens, _ in course], [loss for _, loss in course]))
    (best, winner), *rest = sorted((at(course), name) for name, course in points.items())
    others = ", ".join(f"{name} at {loss:.3f} (+{loss - best:.3f})" for loss, name in rest)
    where = f"At {quantity(most)} tokens, the most that all were trained on and evaluated at"
    yield Sentence(f"{where}, {winner} has the lowest validation loss, {best:.3f}; {others}.")
    for _, name in rest:
        tokens, goal = points[name][-1]
        reached = _first_reach(points[winner], goal)
        if reached is not None and 0 < reached < tokens:
            share = f"{percent(reached / tokens)} of its tokens"
            yield Sentence(f"{winner} reaches the last validation loss of {name} after {share}.")


def _by_tokens(run: Run) -> list[tuple[float, float]]:
    val = run.course("val_loss")
    return list(zip(run.along("tokens", val.steps), val.values))


def _first_reach(points: list[tuple[float, float]], goal: float) -> float | None:
    for (left, before), (right, after) in pairwise(points):
        if before > goal >= after:
            return left + (right - left) * (before - goal) / (before - after)
    return None


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """Return each option, dataset, device and version that differs between runs, with each run's value. It is empty for
    runs that do not have it."""
    facts = [_comparable(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = {name: [each.get(name, "") for each in facts] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _comparable(run: Run) -> dict[str, str]:
    facts = run.options | {"dataset (fingerprint)": run.record["dataset"]}
    facts |= {f"devices: {name}": value for name, value in run.record["devices"].items()}
    facts |= {f"version of {name}": value for name, value in run.record["versions"].items()}
    return {name: as_text(value) for name, value in facts.items() if name not in OWN}


def as_text(value: Any) -> str:
    """Return an option's value as JSON; text stays unquoted."""
    return value if isinstance(value, str) else json.dumps(value)
