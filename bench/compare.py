"""Compare recipes over seeds: python -m bench.compare configs/plain.py "configs/plain.py --model.smear" --seeds=3.

Each recipe is a config, maybe with options. Each trains once with every seed, on the same tokens in the same order. The
others are compared with the first one: the difference of a seed's two runs in bits per byte of held-out text, its mean
over the seeds, Student's 95% interval, and a p-value that Holm's method corrects for the number of comparisons. The
number of seeds is fixed before the runs: to stop at the first clear difference would find too many. The same command
resumes. It prints a table, and writes compare.json and .md.

`"nanochat configs/small.py"` is nanochat's own network and recipe on that config's batches (bench/nanochat.py), with
its schedule for the same number of tokens. It needs torch and NANOCHAT_DIR.

With `--equal=seconds` the runs take equal seconds, not equal tokens. First the recipes' steps are timed in turn. A
recipe whose step takes 5% longer then trains for 5% fewer steps. step_seconds.json keeps the times: a command that
resumes takes as many steps as before.
"""

import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from msgspec import Meta
from scipy.special import stdtr, stdtrit  # JAX depends on SciPy

from bench.recipes import Recipe, make_step, read_recipe, train
from bench.throughput import WARMUP_STEPS
from options.command_line import parse_arguments
from options.schema import FilePath
from system.errors import Exit, UserError
from system.exits import exit_code_of
from system.files import is_there, write_whole

LEVEL = 0.05
TIMED_STEPS = 9  # of each recipe


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Two recipes or more: a config each, or one in quotes with options of train.py; `nanochat CONFIG` in quotes, maybe
    with options of bench.nanochat, too."""
    seeds: Annotated[int, Meta(ge=2, le=100)] = 3
    """Runs of each recipe, with the seeds 0, 1, ..."""
    equal: Literal["tokens", "seconds"] = "tokens"
    """What the recipes' runs have in common, besides their text."""
    out: FilePath = "runs/compare"
    """A folder for the runs, compare.json and compare.md."""


class Comparison(NamedTuple):
    """A recipe minus the first one, in bits per byte."""

    recipe: str
    first: str
    by_seed: list[float]
    difference: float
    interval: tuple[float, float]
    p: float


def compare(recipe: str, first: str, theirs: list[float], ours: list[float]) -> Comparison:
    """Compare the bits per byte of two recipes' runs, paired by seed."""
    differences = np.array(theirs) - np.array(ours)
    count, mean = len(differences), float(differences.mean())
    error = float(differences.std(ddof=1)) / count**0.5
    reach = -float(stdtrit(count - 1, LEVEL / 2)) * error
    p = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Comparison(recipe, first, differences.tolist(), mean, (mean - reach, mean + reach), p)


def holm(p_values: list[float]) -> list[float]:
    """Return p-values that are corrected for their number (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def read_recipes(texts: tuple[str, ...], out: Path, equal: str) -> list[Recipe]:
    """Return the recipes. Raise UserError, before anything runs, for one that is not valid, or that cannot be compared
    with the first one. A wrong option exits with code 2."""
    if len(texts) < 2:
        raise UserError('give two recipes or more: configs/small.py "configs/small.py --model.depth=3"')
    recipes = [read_recipe(text, out) for text in texts]
    ours = recipes[0].shared(equal)
    for other in recipes[1:]:
        theirs = other.shared(equal)
        if different := [f"{name}: {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]:
            raise UserError(f"{texts[0]} and {other.text} differ in text or tokens: {'; '.join(different)}")
    if len({recipe.digest() for recipe in recipes}) < len(recipes):
        raise UserError("two recipes are the same: their runs would be, too")
    return recipes


def with_equal_seconds(recipes: list[Recipe], out: Path) -> list[Recipe]:
    """Return the recipes with the steps that take as long as the first one's. Raise UserError for one that has steps of
    its own, or whose rows are not known before its run."""
    for recipe in recipes:
        if recipe is not recipes[0] and re.search(r"--(steps|epochs)\b", recipe.text):
            raise UserError(f"{recipe.text!r}: --equal=seconds chooses its steps; give them to the first recipe alone")
        if recipe.config.batch.rows_per_device == "auto":
            raise UserError(f"{recipe.text!r}: --equal=seconds times a step, which needs --batch.rows_per_device=ROWS")
    file = out / "step_seconds.json"
    known = json.loads(file.read_text()) if is_there(file) else {}
    digests = [recipe.digest() for recipe in recipes]
    if not all(digest in known for digest in digests):
        known = dict(zip(digests, step_seconds(recipes)))
        out.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(known, indent=2))
    first, *others = recipes
    made = [first]
    for recipe, digest in zip(others, digests[1:]):
        steps = round(first.config.steps * known[digests[0]] / known[digest])
        print(f"{recipe.text}: {known[digest]:.3f} s a step, {first.text}: {known[digests[0]]:.3f} s; {steps} steps")
        made.append(read_recipe(recipe.text, out, (f"--steps={steps}",)))
    return made


def step_seconds(recipes: list[Recipe]) -> list[float]:
    """Return the seconds that a step of each recipe takes: the median over steps in turn, of processor time on a CPU,
    which others may share, and else on the clock."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    steps = [make_step(recipe) for recipe in recipes]
    seconds: list[list[float]] = [[] for _ in recipes]
    for number in range(WARMUP_STEPS + TIMED_STEPS):
        for step, own in zip(steps, seconds):
            started = clock()
            step(number)
            if number >= WARMUP_STEPS:
                own.append(clock() - started)
    return [statistics.median(own) for own in seconds]


def as_table(comparisons: list[Comparison], corrected: list[float]) -> str:
    """Return the comparisons as a table in Markdown."""
    lines = [f"| minus `{comparisons[0].first}` | bits per byte, 95% interval | corrected p | seeds |"]
    lines.append("| --- | --- | --- | --- |")
    for of, p in zip(comparisons, corrected):
        low, high = of.interval
        shown = f"{of.difference:+.4f} [{low:+.4f}, {high:+.4f}]"
        lines.append(f"| `{of.recipe}` | {shown} | {p:.2g} | {len(of.by_seed)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    recipes = read_recipes(arguments.recipes, out, arguments.equal)
    if arguments.equal == "seconds":
        recipes = with_equal_seconds(recipes, out)
    first, *others = recipes
    bits: dict[str, list[float]] = {recipe.text: [] for recipe in recipes}
    for seed in range(arguments.seeds):
        for recipe in recipes:
            bits[recipe.text].append(train(recipe, seed))
    comparisons = [compare(other.text, first.text, bits[other.text], bits[first.text]) for other in others]
    corrected = holm([of.p for of in comparisons])
    compared: list[dict[str, Any]] = [of._asdict() | {"p_corrected": p} for of, p in zip(comparisons, corrected)]
    write_whole(out / "compare.json", json.dumps({"bits_per_byte": bits, "comparisons": compared}, indent=2))
    write_whole(out / "compare.md", table := as_table(comparisons, corrected))
    print(f"{table}in {out}: compare.json and .md")
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))
