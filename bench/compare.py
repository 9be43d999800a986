"""Compare recipes over seeds: python -m bench.compare configs/plain.py "configs/plain.py --model.smear" --seeds=5.

Each recipe is a config, maybe with options. The others are compared with the first one. All train on the same tokens in
the same order, seed after seed, until every difference is clear or `--seeds` are spent. The same command resumes. It
prints intervals and a verdict, and writes compare.json, .md and .png. docs/comparing.md explains the statistics.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from msgspec import Meta
from scipy.interpolate import PchipInterpolator
from scipy.special import stdtrit

from bench.paired import LEVEL, holm, interval, p_value
from bench.recipes import (
    Bits,
    Recipe,
    dataset_folder,
    evaluate_all,
    make_writable,
    read_recipes,
    require_rows,
    train_all,
    why_seconds_differ,
)
from bench.verdicts import AXES, FIRST_ROWS, HELD_OUT_ROWS, as_table, draw, in_words, verdict
from configs.command_line import Exit, exit_code_of, parse_arguments
from configs.files import write_whole
from configs.schema import FilePath, NotNegative, Positive, UserError
from evaluation.evaluator import ratio
from evaluation.results import write_json
from model.gpt import flops_per_token
from tools.report import Run, read_run


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Two recipes or more: a config each, or one in quotes with options of train.py."""
    seeds: Annotated[int, Meta(ge=1, le=12)] = 5
    """Most runs of each recipe. Choose it before you look: the intervals allow looks up to this number."""
    at: Literal["tokens", "FLOPs", "seconds"] = "tokens"
    """The cost that is equal for the verdict. It decides when a comparison ends; the other two are printed, too."""
    documents: NotNegative[int] = 100
    """Held-out documents of a dataset that each network reads at its end, for an interval over documents; 0: none.
    There are none of a mixture, of a dataset at a URL, and of conversations."""
    at_once: Positive[int] = 1
    """Runs of a seed that train side by side on this machine. They take less time together, and the results are the
    same, but for the seconds. On a GPU they share its memory."""
    out: FilePath = "runs/compare"
    """A folder for the runs, compare.json, compare.md and compare.png."""


class Outcome(NamedTuple):
    """The results of a complete run."""

    curves: dict[str, tuple[list[float], list[float]]]
    documents: Bits
    first_rows: Bits
    """Bits and bytes of each document's first row."""
    made: set[tuple[str, str | None]]
    """The dataset's fingerprint and the code's hash of each start."""


@dataclass
class Pair:
    """A recipe and the first one, and what their seeds gave so far."""

    first: Recipe
    other: Recipe
    seeds: int
    """Most seeds."""
    differences: dict[str, list[float]] = field(default_factory=lambda: {axis: [] for axis in AXES})
    """Bits per byte of the other less the first, for each axis and seed."""
    shares: dict[str, list[list[float]]] = field(default_factory=lambda: {axis: [] for axis in AXES})
    """The share of each of the two runs up to which they are compared."""
    documents: list[tuple[Bits, Bits]] = field(default_factory=list)
    """Each seed's bits and bytes of documents, under the first and the other; of first rows with `by_first_rows`."""

    @property
    def by_first_rows(self) -> bool:
        """Return whether packings differ, and so the rows of evaluation. A document's first row is the same text after
        the same BOS, and both networks were trained on such."""
        return self.first.config.data.packing != self.other.config.data.packing

    def add(self, first: Outcome, other: Outcome) -> None:
        """Add a seed. Raise UserError if the text or the code of its two runs differ."""
        if len(made := first.made | other.made) > 1:
            raise UserError(f"text or code changed between runs in {self.first.out} ({made}): give another --out")
        documents = (first.first_rows, other.first_rows) if self.by_first_rows else (first.documents, other.documents)
        self.documents.append(documents)
        if self.by_first_rows:
            self.differences["tokens"].append(over_documents([documents])["difference"])
            self.shares["tokens"].append([1.0, 1.0])
            return
        for axis in AXES:
            both = (first.curves[axis], other.curves[axis])
            end = min(x[-1] for x, _ in both)
            bits = [float(PchipInterpolator(x, y)(end)) for x, y in both]
            self.differences[axis].append(bits[1] - bits[0])
            self.shares[axis].append([end / x[-1] for x, _ in both])

    def p_value(self, axis: str) -> float:
        return float(p_value(np.array(self.differences[axis]), self.seeds))


def over_documents(seeds: list[tuple[Bits, Bits]]) -> dict[str, Any]:
    """Return the difference over documents, the mean of the seeds, with a 95% interval by Student's t. It is of these
    networks: another seed gives others."""
    names = seeds[0][0].keys()
    mean = lambda name: float(np.mean([other[name][0] - first[name][0] for first, other in seeds]))
    value, error = ratio([mean(name) for name in names], [seeds[0][0][name][1] for name in names])
    reach = -float(stdtrit(len(names) - 1, LEVEL / 2)) * (error or 0.0)
    return {"difference": value, "interval": [value - reach, value + reach], "documents": len(names)}


def outcome(recipe: Recipe, seed: int, documents: int) -> Outcome:
    """Return what a recipe's complete run with a seed gives."""
    run = read_run(recipe.run_dir(seed))
    starts = [event for event in run.events if event["event"] == "start"]
    made = {(run.record["dataset"], start.get("code_hash")) for start in starts}
    return Outcome(curves(recipe, run), *recipe.documents(seed, documents), made)


def curves(recipe: Recipe, run: Run) -> dict[str, tuple[list[float], list[float]]]:
    """Return bits per byte of held-out text along a run, against each axis. Raise UserError if it diverged."""
    steps, bits = run.course("val_bpb")
    if not steps or steps[-1] != recipe.config.steps:
        raise UserError(f"{run.folder} has no finite bits per byte at its end; leave {recipe.text} out")
    tokens = run.along("tokens", steps)
    flops = flops_per_token(recipe.config.model, recipe.config.batch.sequence_length)
    return {
        "tokens": (tokens, bits),
        "FLOPs": ([flops * count for count in tokens], bits),
        "seconds": (run.along("seconds", steps), bits),
    }


def corrected(pairs: list[Pair], axis: str) -> list[float]:
    """Return the pairs' p-values on an axis, corrected for their number."""
    return holm(np.array([pair.p_value(axis) for pair in pairs])).tolist()


def results(pairs: list[Pair], arguments: Arguments) -> dict[str, Any]:
    """Return everything that compare.json records."""
    by_axis = {axis: corrected(pairs, axis) for axis in AXES}
    compared = []
    for i, pair in enumerate(pairs):
        count = len(pair.documents)
        folders = [recipe.run_dir(seed) for recipe in (pair.first, pair.other) for seed in range(count)]
        axes = {}
        for axis in AXES if not pair.by_first_rows else ("tokens",):
            low, high = (float(end) for end in interval(np.array(pair.differences[axis]), arguments.seeds))
            axes[axis] = {
                "difference": float(np.mean(pair.differences[axis])),
                "interval": [low, high] if count > 1 else None,
                "by_seed": pair.differences[axis],
                "p": pair.p_value(axis),
                "p_corrected": by_axis[axis][i],
                "shares_of_runs": np.mean(pair.shares[axis], axis=0).tolist(),
            }
        of = {"recipe": pair.other.text, "first": pair.first.text, "seeds": count, "axes": axes}
        of |= {"documents": over_documents(pair.documents) if len(pair.documents[0][0]) > 1 else None}
        why = why_seconds_differ(folders) if "seconds" in axes else ""
        of |= {"text": FIRST_ROWS if pair.by_first_rows else HELD_OUT_ROWS, "seconds_not_comparable": why}
        of |= {"runs": [folder.name for folder in folders]}
        compared.append(of | {"verdict": verdict(of, arguments.at, arguments.seeds)})
    return {"at": arguments.at, "most_seeds": arguments.seeds, "comparisons": compared}


def require_documents(first: Recipe, arguments: Arguments) -> None:
    """Raise UserError unless documents can give the verdict on recipes with different rows."""
    if arguments.at != "tokens":
        raise UserError(f"--at={arguments.at}: recipes with another data.packing are compared at equal tokens only")
    if not arguments.documents or not dataset_folder(first.config.data, first.config.model.vocab_size):
        raise UserError(
            "recipes with another data.packing are compared on the first rows of documents, since their held-out rows "
            "differ; give --documents=1000, and one dataset of text on this machine"
        )


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if arguments.at == "seconds" and arguments.at_once > 1:
        raise UserError("--at=seconds needs --at_once=1: runs side by side slow each other")
    first, *others = recipes = read_recipes(arguments.recipes, out)
    require_rows(recipes, arguments.at_once)
    pairs = [Pair(first, other, arguments.seeds) for other in others]
    if any(pair.by_first_rows for pair in pairs):
        require_documents(first, arguments)
    make_writable(out)
    compared: dict[str, Any] = {}
    folders: list[Path] = []
    for seed in range(arguments.seeds):
        running = [pair for pair, p in zip(pairs, corrected(pairs, arguments.at)) if p > LEVEL]
        if not running:
            break
        needed = [(recipe, seed) for recipe in [first, *(pair.other for pair in running)]]
        for runs in [needed] if arguments.at_once > 1 else [[run] for run in needed]:
            folders += train_all(runs, arguments.at_once)
            if arguments.at == "seconds" and (why := why_seconds_differ(folders)):
                raise UserError(f"no verdict at equal seconds, since {why}; delete that folder in {out}, and repeat")
            evaluate_all(runs, arguments.documents, arguments.at_once)
        outcomes = {recipe.digest: outcome(recipe, seed, arguments.documents) for recipe, _ in needed}
        for pair in running:
            pair.add(outcomes[first.digest], outcomes[pair.other.digest])
        compared = results(pairs, arguments)
        write_json(out / "compare.json", compared)
        write_whole(out / "compare.md", as_table(compared))
        draw(compared, out / "compare.png")
    for of in compared["comparisons"]:
        print(in_words(of, len(pairs)))
    print(f"in {out}: compare.json, .md and .png; with the curves: python -m tools.report {out}")
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))
