"""Train one recipe at several depths, and fit a power law: python -m bench.miniseries --depths=2,4,6 [--hours=8].

Each depth trains once, at the horizon, batch and rates that its config derives. The law is
loss = A x FLOPs^-exponent, in bits per byte of held-out text, by least squares of logarithms with Student's 95%
intervals. The table also says what the smaller depths alone would have predicted of each one: compare that with what
was measured before you trust the law beyond the largest. The same command resumes. It writes miniseries.json, .md and
.png.
"""

import json
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from scipy.special import stdtrit  # JAX depends on SciPy

from bench.compare import LEVEL
from bench.recipes import Recipe, read_recipe, train
from model.gpt import flops_per_token
from options.command_line import parse_arguments
from options.schema import FilePath, NotNegative
from system.errors import Exit, UserError
from system.exits import exit_code_of
from system.files import write_picture, write_whole

FURTHER = 10.0
"""The law is also printed at this many times the FLOPs of the largest depth."""


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    recipe: Annotated[str, tyro.conf.Positional] = "configs/nanochat.py"
    """A config that derives its run from the depth, or one in quotes with options of train.py."""
    depths: str = "2,4,6"
    """Depths, from small to large, two at least; three give an interval."""
    hours: NotNegative[float] = 0.0
    """Begin no further depth after this many hours. 0: no limit."""
    out: FilePath = "runs/miniseries"
    """A folder for the runs, miniseries.json, .md and .png."""


class Point(NamedTuple):
    """A run of the series."""

    depth: int
    tokens: int
    flops: float
    loss: float
    """Bits per byte of held-out text."""


class Law(NamedTuple):
    """The logarithm of the loss as a line in the logarithm of FLOPs: level - exponent x (log FLOPs - centre)."""

    centre: float
    level: float
    exponent: float
    count: int
    """Points of the fit."""
    spread: float
    """Sum of squares of log FLOPs about the centre."""
    residual: float
    """Standard deviation of a point about the line; infinite with two points, which are always on it."""

    @property
    def exponent_interval(self) -> tuple[float, float]:
        """Return the exponent's 95% interval by Student's t."""
        reach = self._reach(1 / self.spread)
        return self.exponent - reach, self.exponent + reach

    def loss(self, flops: float) -> float:
        """Return the loss of the law."""
        return float(np.exp(self.level - self.exponent * (np.log(flops) - self.centre)))

    def interval(self, flops: float) -> tuple[float, float]:
        """Return the 95% interval for the loss of one more run, if the law holds there."""
        loss, distance = self.loss(flops), np.log(flops) - self.centre
        factor = float(np.exp(self._reach(1 + 1 / self.count + distance**2 / self.spread)))
        return loss / factor, loss * factor

    def _reach(self, variance: float) -> float:
        """Return half the width of an interval, for a variance in units of a point's."""
        if self.count == 2:
            return float("inf")
        return -float(stdtrit(self.count - 2, LEVEL / 2)) * self.residual * float(np.sqrt(variance))


def fit(points: list[Point]) -> Law:
    """Return the power law of two points or more, by least squares of logarithms."""
    x, y = np.log([point.flops for point in points]), np.log([point.loss for point in points])
    centre, level = float(x.mean()), float(y.mean())
    spread = float(np.sum((x - centre) ** 2))
    slope = float(np.sum((x - centre) * (y - level))) / spread
    squares = float(np.sum((y - level - slope * (x - centre)) ** 2))
    residual = np.sqrt(squares / (len(points) - 2)) if len(points) > 2 else np.inf
    return Law(centre, level, -slope, len(points), spread, float(residual))


def read_depths(text: str) -> list[int]:
    """Return the depths. Raise UserError if they are not two or more whole numbers from small to large."""
    words = text.split(",")
    depths = [int(word) for word in words if word.strip().isdecimal()]
    if len(depths) < max(2, len(words)) or depths != sorted(set(depths)) or not depths[0]:
        raise UserError(f"--depths={text}: give two whole numbers or more, from small to large, as --depths=2,4,6")
    return depths


def read_recipes(arguments: Arguments) -> list[tuple[int, Recipe]]:
    """Return each depth with its recipe. Raise UserError for one that is not valid, before anything runs."""
    recipes = []
    for depth in read_depths(arguments.depths):
        with redirect_stdout(sys.stderr):  # nanochat.py prints what it derives
            recipe = read_recipe(f"{arguments.recipe} --model.depth={depth}", Path(arguments.out))
        recipes.append((depth, recipe))
    return recipes


def point_of(depth: int, recipe: Recipe) -> Point:
    """Train a depth, or resume it, and return its point."""
    config = recipe.config
    tokens = config.steps * config.batch.tokens_per_step
    flops = tokens * flops_per_token(config.model, config.batch.sequence_length)
    return Point(depth, tokens, flops, train(recipe, config.seed))


def as_table(points: list[Point]) -> str:
    """Return the points as a table in Markdown, each with what the smaller ones predict of it."""
    lines = ["| depth | tokens | FLOPs | bits per byte | predicted from the smaller depths |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for i, point in enumerate(points):
        predicted = "-"
        if i > 1:
            loss = fit(points[:i]).loss(point.flops)
            predicted = f"{loss:.4f}: {loss - point.loss:+.4f}"
        lines.append(f"| {point.depth} | {point.tokens:,} | {point.flops:.3g} | {point.loss:.4f} | {predicted} |")
    return "\n".join(lines) + "\n"


def as_text(law: Law, most: float) -> str:
    """Return the law, and what it says of `most` FLOPs and of FURTHER times as many."""
    low, high = law.exponent_interval
    lines = [f"bits per byte = {law.loss(1.0):.4g} x FLOPs^-{law.exponent:.4f} [{low:.4f}, {high:.4f}]"]
    for flops in (most, FURTHER * most):
        low, high = law.interval(flops)
        lines.append(f"at {flops:.3g} FLOPs: {law.loss(flops):.4f} [{low:.4f}, {high:.4f}]")
    return "\n".join(lines) + "\n"


def draw(points: list[Point], law: Law, path: Path) -> None:
    """Draw the points, and the law with the interval for one more run."""
    from matplotlib.figure import Figure  # a second to import

    most, least = max(point.flops for point in points), min(point.flops for point in points)
    flops = np.geomspace(least / 2, FURTHER * most, 100)
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.add_subplot()
    measured = [point.loss for point in points]
    axes.plot([point.flops for point in points], measured, "o", color="black", label="measured")
    for point in points:
        axes.annotate(f"depth {point.depth}", (point.flops, point.loss), (6, 6), textcoords="offset points")
    inside = flops <= most
    label = f"FLOPs^-{law.exponent:.3f}"
    axes.plot(flops[inside], [law.loss(x) for x in flops[inside]], color="tab:blue", label=label)
    axes.plot(flops[~inside], [law.loss(x) for x in flops[~inside]], "--", color="tab:blue", label="beyond the runs")
    if law.count > 2:
        low, high = zip(*(law.interval(x) for x in flops))
        axes.fill_between(flops, low, high, color="tab:blue", alpha=0.15, label="95% for one more run")
    axes.set(xscale="log", yscale="log", ylim=(law.loss(flops[-1]) / 1.3, max(measured) * 1.3))
    axes.set(xlabel="training FLOPs", ylabel="bits per byte, held out")
    axes.yaxis.set_major_formatter("{x:.2g}")
    axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower left")
    write_picture(path, figure)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    recipes, began = read_recipes(arguments), time.monotonic()
    points, left_out = [], []
    for depth, recipe in recipes:
        if arguments.hours and points and time.monotonic() - began > 3600 * arguments.hours:
            left_out.append(depth)
            continue
        points.append(point_of(depth, recipe))
    if left_out:
        print(f"not begun after {arguments.hours:g} hours: depth {', '.join(map(str, left_out))}")
    if len(points) < 2:
        raise UserError(
            f"--hours={arguments.hours:g} sufficed for one depth; a law needs two: the same command goes on"
        )
    out, law = Path(arguments.out), fit(points)
    text = f"{as_table(points)}\n{as_text(law, points[-1].flops)}"
    content = {"recipe": arguments.recipe, "points": [point._asdict() for point in points], "law": law._asdict()}
    write_whole(out / "miniseries.json", json.dumps(content, indent=2))
    write_whole(out / "miniseries.md", text)
    draw(points, law, out / "miniseries.png")
    print(f"{text}in {out}: miniseries.json, .md and .png")
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))
