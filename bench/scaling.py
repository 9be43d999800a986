"""Fit loss over sizes and horizons of the dial in miniature: python -m bench.scaling --depths 1 2 3

Each depth of configs/nanochat.py's dial trains on each number of tokens a parameter, in steps of several sizes. The
program fits L = E + A / N^a + B / D^b to the loss at the best size of step, for N parameters and D tokens. It prints
the number of tokens a parameter and the exponent of the best size of step that the runs support, next to the dial's. It
writes scaling.json. The same command continues. docs/scaling.md explains the figures.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Float
from msgspec import Meta
from scipy.optimize import least_squares  # JAX depends on SciPy

from bench.minima import bits_of, minimum, recipe_of, shown, slope, write_results
from bench.recipes import Recipe
from configs.command_line import Exit, exit_code_of, parse_arguments
from configs.nanochat import (
    BATCH_EXPONENT,
    REFERENCE_BATCH,
    REFERENCE_DEPTH,
    TOKENS_PER_PARAMETER,
    batch_for,
    network_of_depth,
    scaling_parameters,
)
from configs.schema import FilePath, Positive
from run.record import read_metrics

MINIATURE = "configs/nanochat.py --model.head_dim=64 --model.vocab_size=4096 --model.loss_chunks=4"
MINIATURE += " --batch.sequence_length=256 --batch.rows_per_device=64 --eval.tokens=131072 --eval.prompts=[]"
DRAWS = 300  # of the bootstrap
ENDS = (2.5, 97.5)  # percentiles of a 95% interval
Values = Float[np.ndarray, "points"]


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    recipe: str = MINIATURE
    """The dial, with options of a small size, in quotes."""
    depths: Annotated[tuple[Positive[int], ...], Meta(min_length=3)] = (1, 2, 3)
    """Depths of the networks, 64 channels of width each."""
    horizons: Annotated[tuple[Positive[float], ...], Meta(min_length=3)] = (3, 6, 12, 24)
    """Tokens for each parameter of blocks and head."""
    batches: tuple[Positive[float], ...] = (0.0625, 0.125, 0.25, 0.5, 1.0)
    """Factors of the dial's tokens of a step for that horizon."""
    seeds: Positive[int] = 1
    """Runs of each, with the seeds 0, 1, ..."""
    at_once: Positive[int] = 1
    """Runs side by side."""
    out: FilePath = "runs/scaling"
    """A folder for the runs and scaling.json."""


class Cell(NamedTuple):
    """A network and a horizon."""

    depth: int
    parameters: int
    tokens: int
    dial: int
    """Tokens of a step by the dial's rule."""
    recipes: list[Recipe]
    """One for each size of step."""

    @property
    def batches(self) -> list[int]:
        """Return the tokens of a step of each recipe."""
        return [recipe.config.batch.tokens_per_step for recipe in self.recipes]


def cells_of(arguments: Arguments) -> list[Cell]:
    """Return the networks and horizons. Rates follow from the step by the dial. So does Muon's decay, but for this
    horizon. The warmup is the share of the steps that it has at depth 12."""
    cells, out = [], Path(arguments.out)
    for depth in arguments.depths:
        sized = f"{arguments.recipe} --model.depth={depth}"
        config = recipe_of(f"{sized} --batch.tokens_per_step={REFERENCE_BATCH}", out).config
        parameters, length = scaling_parameters(config.model), config.batch.sequence_length
        reference = TOKENS_PER_PARAMETER * scaling_parameters(network_of_depth(config.model, REFERENCE_DEPTH))
        for horizon in arguments.horizons:
            tokens, texts = round(horizon * parameters), {}
            dial = batch_for(tokens, reference)
            for factor in sorted(arguments.batches):
                batch = max(1, round(factor * dial / length)) * length
                decay = config.optimizer.muon.weight_decay * TOKENS_PER_PARAMETER / horizon
                decay *= math.sqrt(batch / REFERENCE_BATCH)
                steps = max(1, round(tokens / batch))
                warmup = round(config.optimizer.schedule.warmup_steps * steps * REFERENCE_BATCH / reference)
                texts[batch] = (
                    f"{sized} --batch.tokens_per_step={batch} --steps={steps} --optimizer.muon.weight_decay={decay}"
                    f" --optimizer.schedule.warmup_steps={warmup}"
                )
            cells.append(Cell(depth, parameters, tokens, dial, [recipe_of(text, out) for text in texts.values()]))
    return cells


class Law(NamedTuple):
    """L = E + A (N / N0)^-a + B (D / D0)^-b: N0 and D0 are geometric means of the points."""

    E: float
    A: float
    a: float
    B: float
    b: float

    def loss(self, n: Values, d: Values) -> Values:
        """Return the loss for n = N / N0 and d = D / D0."""
        return self.E + self.A * n**-self.a + self.B * d**-self.b

    def optimum(self, n: float) -> float:
        """Return d of the lowest loss among networks and horizons with the same product n d as this n."""
        return float(np.power(self.b * self.B / (self.a * self.A) * n**self.a, 1 / self.b))


LOW, HIGH = [-9.0, -9.0, 0.01, -9.0, 0.01], [3.0, 3.0, 3.0, 3.0, 3.0]
"""Bounds of log E, log A, a, log B, b."""


def fitted(n: Values, d: Values, losses: Values, starts: Sequence[Law] = ()) -> Law:
    """Return the law of the least squares of the logarithm of the loss."""
    law = lambda x: Law(*map(float, (np.exp(x[0]), np.exp(x[1]), x[2], np.exp(x[3]), x[4])))
    residuals = lambda x: np.log(law(x).loss(n, d) / losses)
    low = losses.min()
    starts = starts or [
        Law(s * low, (1 - s) * low / 2, a, (1 - s) * low / 2, a) for s in (0.3, 0.8) for a in (0.2, 0.6)
    ]
    begins = [[math.log(of.E), math.log(of.A), of.a, math.log(of.B), of.b] for of in starts]
    fits = [least_squares(residuals, np.clip(x, LOW, HIGH), bounds=(LOW, HIGH)) for x in begins]
    return law(min(fits, key=lambda fit: fit.cost).x)


def law_of(parameters: Values, tokens: Values, losses: Values) -> dict[str, Any]:
    """Return the law, and its best tokens a parameter for the largest network, with 95% intervals by a bootstrap over
    the points."""
    sizes = [float(np.exp(np.log(values).mean())) for values in (parameters, tokens)]
    n, d, largest = parameters / sizes[0], tokens / sizes[1], float(parameters.max())
    ratio = lambda law: law.optimum(largest / sizes[0]) * sizes[1] / largest
    figures = lambda law: law._asdict() | {"tokens_per_parameter": ratio(law), "tokens_exponent": law.a / law.b}
    law, chance = fitted(n, d, losses), np.random.default_rng(0)
    draws = [figures(fitted(n[i], d[i], losses[i], [law])) for i in chance.integers(len(n), size=(DRAWS, len(n)))]
    interval = lambda name: np.percentile([draw[name] for draw in draws], ENDS).tolist()
    values = {name: {"value": value, "interval": interval(name)} for name, value in figures(law).items()}
    misfit = float(np.std(np.log(law.loss(n, d) / losses)))
    return values | {"N0": sizes[0], "D0": sizes[1], "largest": int(largest), "misfit": misfit}


def analysed(cells: Sequence[Cell], bits: Sequence[Float[np.ndarray, "batches seeds"]]) -> dict[str, Any]:
    """Return each cell's bits per byte and best steps, the law, and the exponent of the best step over the tokens."""
    rows, points, batches = [], [], []
    for cell, of_cell in zip(cells, bits):
        lowest = [minimum(np.log2(cell.batches).tolist(), values) for values in of_cell.T.tolist()]
        points += [(cell.parameters, cell.tokens, loss) for _, loss in lowest if math.isfinite(loss)]
        batches += [(math.log2(cell.tokens), best) for best, _ in lowest]
        row = {name: getattr(cell, name) for name in ("depth", "parameters", "tokens", "dial")}
        row |= {"bits": dict(zip(map(str, cell.batches), of_cell.tolist())), "best": [best for best, _ in lowest]}
        rows.append(row | {"lowest": [loss for _, loss in lowest]})
    return {"cells": rows, "law": law_of(*np.array(points).T), "batch": slope(*zip(*batches))}


def in_words(made: dict[str, Any]) -> str:
    """Return the results for a terminal."""
    lines = ["| depth | parameters | tokens | bits per byte by tokens of a step | best step |"]
    for row in made["cells"]:
        by_batch = ", ".join(f"{batch}: {np.mean(values):.4f}" for batch, values in row["bits"].items())
        best = ", ".join("at an end" if math.isnan(at) else f"{2**at:,.0f}" for at in row["best"])
        lines.append(f"| {row['depth']} | {row['parameters']:,} | {row['tokens']:,} | {by_batch} | {best} |")
    law, batch = made["law"], made["batch"]
    ends = [math.isnan(best) for row in made["cells"] for best in row["best"]]
    lines += [
        f"E {shown(law['E'])}, a {shown(law['a'])}, b {shown(law['b'])}; misfit {law['misfit']:.2%}",
        f"best tokens a parameter, for {law['largest']:,}: {shown(law['tokens_per_parameter'])}; the dial's 12",
        f"best tokens as parameters^p, p {shown(law['tokens_exponent'])}; the dial's 1",
        f"best step as tokens^p, p {shown(batch) if batch else 'unknown'}; the dial's {BATCH_EXPONENT}",
        f"{sum(ends)} of {len(ends)} best steps are at an end of the batches: the exponent leaves them out, and the "
        "law counts their lowest loss",
    ]
    repeated = ": beyond 4 times it is worth less (arXiv:2305.16264)" if made["epochs"] > 4 else ""
    return "\n".join([*lines, f"the longest run reads the text {made['epochs']:.1f} times{repeated}"])


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out, cells = Path(arguments.out), cells_of(arguments)
    recipes = [recipe for cell in cells for recipe in cell.recipes]
    bits = bits_of(recipes, arguments.seeds, arguments.at_once)
    ends = np.cumsum([len(cell.recipes) for cell in cells])[:-1]
    made = {"recipe": arguments.recipe} | analysed(cells, np.split(bits, ends))
    lines = [line for recipe in recipes for line in read_metrics(recipe.run_dir(0))]
    made["epochs"] = max(max(line["epochs"].values()) for line in lines if "epochs" in line)
    print(in_words(made))
    write_results(out / "scaling.json", made)
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))
