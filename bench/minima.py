"""Where a loss is lowest over a factor, how this place follows from a size, and the runs that it takes."""

import contextlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit  # JAX depends on SciPy
from scipy.stats import linregress

from bench.paired import LEVEL
from bench.recipes import Recipe, make_writable, read_recipe, require_rows, train_all
from configs.command_line import Exit
from configs.files import write_whole
from run.record import Events, read_metrics, scores


def minimum(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the vertex (x, y) of the parabola through the lowest point and its neighbours. A diverged run has infinite
    y; if a neighbour has, the lowest point itself counts. x is NaN if that point is at an end."""
    i = int(np.argmin(y))
    if i in (0, len(y) - 1) or not math.isfinite(y[i]):
        return math.nan, float(y[i])
    (before, here, after), (low, lowest, high) = x[i - 1 : i + 2], y[i - 1 : i + 2]
    if not math.isfinite(low + high) or low == lowest == high:
        return here, lowest
    curve = np.polyfit(np.array([before, here, after]) - here, np.array([low, lowest, high]) - lowest, 2)
    vertex = -curve[1] / (2 * curve[0])
    return float(here + vertex), float(lowest + np.polyval(curve, vertex))


def slope(x: Sequence[float], y: Sequence[float]) -> dict[str, Any] | None:
    """Return the slope of y over x by least squares, its standard error and its 95% interval by Student's t, without
    the values of y that are NaN. Return None for fewer than three, or if x does not vary."""
    known = [(a, b) for a, b in zip(x, y) if not math.isnan(b)]
    if len(known) < 3 or len({a for a, _ in known}) < 2:
        return None
    places, values = zip(*known)
    value, intercept, _, _, error = np.array(linregress(places, values)).tolist()
    reach = -float(stdtrit(len(known) - 2, LEVEL / 2)) * error
    return {"value": value, "intercept": intercept, "error": error, "interval": [value - reach, value + reach]}


def shown(of: dict[str, Any]) -> str:
    """Return a value with its interval."""
    return "{:.3g} [{:.3g}, {:.3g}]".format(of["value"], *of["interval"])


def recipe_of(text: str, out: Path) -> Recipe:
    """Return the recipe, without the dial's lines about derived options. Raise UserError if it is not valid."""
    with contextlib.redirect_stdout(io.StringIO()):
        return read_recipe(text, out)


def bits_of(recipes: Sequence[Recipe], seeds: int, at_once: int) -> Float[np.ndarray, "recipes seeds"]:
    """Train each recipe with each seed, unless it is complete. Return the final bits per byte of held-out text, which
    are infinite for a diverged run."""
    require_rows(recipes, at_once)
    make_writable(recipes[0].out)
    runs = [(recipe, seed) for seed in range(seeds) for recipe in recipes]
    complete = sum((recipe.run_dir(seed) / "summary.json").exists() for recipe, seed in runs)
    ended = lambda: [run for run in runs if diverged(run[0].run_dir(run[1]))]
    print(f"{len(runs)} runs, {complete} of them complete", flush=True)
    while True:
        before = ended()
        try:
            train_all([run for run in runs if run not in before], at_once)
            break
        except SystemExit as end:
            if end.code != Exit.FAILED or ended() == before:
                raise
    final = lambda recipe, seed: scores(recipe.run_dir(seed)).get(recipe.config.steps, math.inf)
    return np.array([[final(recipe, seed) for seed in range(seeds)] for recipe in recipes])


def diverged(folder: Path) -> bool:
    """Return whether a run gave up, since its gradients were not finite."""
    stops = [event["code"] for event in Events(folder).read() if event["event"] == "stop"]
    return stops[-1:] == [Exit.FAILED] and any(line.get("skipped_steps") for line in read_metrics(folder))


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, and print where. Numbers that are not finite become null."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    print(f"in {path.parent}: {path.name}")
