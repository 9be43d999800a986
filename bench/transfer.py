"""Measure whether the best rates stay from size to size: python -m bench.transfer --widths 128 256 512

Networks of several widths, and of several depths, train on equal tokens with all rates times each factor. The program
prints bits per byte by factor, each size's best factor, and the exponent of the best factor over width and depth. It
writes transfer.json. The same command continues. docs/scaling.md explains the figures.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from msgspec import Meta

from bench.minima import bits_of, minimum, recipe_of, shown, slope, write_results
from configs.command_line import Exit, exit_code_of, parse_arguments
from configs.schema import Config, FilePath, Positive, UserError, options

Size = tuple[int, int]


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    recipe: str = "configs/small.py --eval.prompts=[]"
    """A config, maybe with options, in quotes. Its own width and depth stay where the other one varies."""
    widths: tuple[Positive[int], ...] = (128, 256, 512)
    """Widths: multiples of the recipe's head_dim."""
    depths: tuple[Positive[int], ...] = (2, 4, 8, 16)
    """Depths."""
    factors: Annotated[tuple[Positive[float], ...], Meta(min_length=3)] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Factors of the recipe's rates."""
    groups: tuple[str, ...] = ()
    """Groups of parameters whose rates are multiplied, such as `muon`. Empty: all."""
    seeds: Positive[int] = 1
    """Runs of each, with the seeds 0, 1, ..."""
    at_once: Positive[int] = 1
    """Runs side by side."""
    out: FilePath = "runs/transfer"
    """A folder for the runs and transfer.json."""


def words(base: Config, size: Size, factor: float, groups: Sequence[str]) -> str:
    """Return the options of a size with its rates times a factor."""
    width, depth = size
    heads, left = divmod(width, base.model.head_dim)
    if left:
        raise UserError(f"--widths: {width} is not a multiple of the recipe's head_dim={base.model.head_dim}")
    names = [f"optimizer.{group}.peak_rate" for group in groups] or ["optimizer.rate_factor"]
    every: dict[str, Any] = options(base)
    if unknown := [name for name in names if name not in every]:
        known = ", ".join(name.split(".")[1] for name in every if name.endswith(".peak_rate"))
        raise UserError(f"--groups: there is no --{unknown[0]}; groups: {known}")
    sizes = {"width": width, "depth": depth, "heads": heads, "kv_heads": heads}
    given = {f"model.{name}": value for name, value in sizes.items()} | {name: every[name] * factor for name in names}
    return " ".join(f"--{name}={value}" for name, value in given.items())


def analysed(sizes: Sequence[Size], factors: Sequence[float], bits: Float[np.ndarray, "sizes factors seeds"]) -> Any:
    """Return each size's bits per byte, and log2 of its best factor: of each seed, the mean and its standard error."""
    logs, results = np.log2(factors).tolist(), []
    for (width, depth), of_size in zip(sizes, bits):
        best = [minimum(logs, values)[0] for values in of_size.T.tolist()]
        mean, error = float(np.mean(best)), math.nan
        if len(best) > 1:
            error = float(np.std(best, ddof=1)) / math.sqrt(len(best))
        by_factor = dict(zip(map(str, factors), of_size.tolist()))
        results.append({"width": width, "depth": depth, "bits": by_factor, "best": best, "mean": mean, "error": error})
    return results


def in_words(along: str, fit: dict[str, Any] | None, results: Sequence[dict[str, Any]]) -> str:
    """Return whether the best rate moves along the sizes."""
    beyond = sum(math.isnan(best) for of in results for best in of["best"])
    note = f"; {beyond} best factors are at the end of the factors, and left out" if beyond else ""
    if not fit:
        return f"{along}: no exponent, since fewer than three best factors are known{note}"
    low, high = fit["interval"]
    verdict = "is not shown to move" if low <= 0 <= high else "moves"
    return f"{along}: the best rate {verdict}: best factor as {along}^p, p {shown(fit)}, s.e. {fit['error']:.2g}{note}"


def row(of: dict[str, Any]) -> str:
    """Return a size's row of the table."""
    means = [float(np.mean(values)) for values in of["bits"].values()]
    cells = [f"{mean:.4f}" if math.isfinite(mean) else "diverged" for mean in means]
    best = "at an end" if math.isnan(of["mean"]) else f"{2 ** of['mean']:.2f}"
    best += "" if math.isnan(of["error"]) else f" (log2 {of['mean']:+.2f} +- {of['error']:.2f})"
    return "| " + " | ".join([f"{of['width']} x {of['depth']}", *cells, best]) + " |"


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out, factors = Path(arguments.out), sorted(set(arguments.factors))
    base = recipe_of(arguments.recipe, out).config
    along = {
        "width": [(width, base.model.depth) for width in sorted(set(arguments.widths))],
        "depth": [(base.model.width, depth) for depth in sorted(set(arguments.depths))],
    }
    sizes = list(dict.fromkeys([*along["width"], *along["depth"]]))
    options_of_all = [words(base, size, factor, arguments.groups) for size in sizes for factor in factors]
    recipes = [recipe_of(f"{arguments.recipe} {more}", out) for more in options_of_all]
    bits = bits_of(recipes, arguments.seeds, arguments.at_once).reshape(len(sizes), len(factors), arguments.seeds)
    by_size = dict(zip(sizes, analysed(sizes, factors, bits)))
    print(f"| width x depth | {' | '.join(f'x{factor:g}' for factor in factors)} | best |")
    print("\n".join(map(row, by_size.values())))
    fits = {}
    for name, of_series in along.items():
        results = [by_size[size] for size in of_series]
        points = [(math.log2(of[name]), best) for of in results for best in of["best"]]
        fits[name] = slope(*zip(*points))
        print(in_words(name, fits[name], results))
    made = {"recipe": arguments.recipe, "groups": arguments.groups, "sizes": list(by_size.values()), "exponents": fits}
    write_results(out / "transfer.json", made)
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))
