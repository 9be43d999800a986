"""Measure how the sizes of activations and updates follow from width and depth: python -m bench.coordinates

A coordinate check (arXiv:2203.03466, D.1) of configs/nanochat.py's network and optimizer, with its rates for steps of
2^19 tokens. Each size of network takes its first ten steps, of 1,024 tokens of the standard library. The program prints
a JSON line for each, then a table of exponents. A size is a root mean square (RMS).
"""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from msgspec import Meta

from bench.exactness import text_of
from configs.command_line import parse_arguments
from configs.nanochat import get_config
from configs.schema import Config, Positive, with_options
from configs.validation import resolved
from data.loader import StepBatches, to_devices
from hosts.runtime import run_command
from training.build import build
from training.optimizer import path_name
from training.state import split_model

STEPS = 10
HEAD_DIM = 64
WIDTH, DEPTH = 128, 2  # of the networks whose other size varies
INITIAL, CHANGE, NORM = "initial size", "change", "norm of the change"
Line = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The sizes of the networks."""

    widths: tuple[Annotated[int, Meta(gt=0, multiple_of=HEAD_DIM)], ...] = (64, 128, 256, 512, 1024)
    """Widths of the networks of depth 2: multiples of 64, the channels of a head."""
    depths: tuple[Positive[int], ...] = (2, 4, 8, 16, 24)
    """Depths of the networks of width 128."""


def sized(width: int, depth: int, **values: object) -> Config:
    """Return nanochat.py's config for this network, small steps, and other `values` by their options' names."""
    heads = width // HEAD_DIM
    sizes = {"width": width, "depth": depth, "heads": heads, "kv_heads": heads, "head_dim": HEAD_DIM}
    sizes |= {"vocab_size": 4096, "dtype": "float32"}
    batch = {"sequence_length": 128, "tokens_per_step": 1024, "rows_per_device": 8}
    model_and_batch = {f"model.{name}": value for name, value in sizes.items()}
    model_and_batch |= {f"batch.{name}": value for name, value in batch.items()}
    return resolved(with_options(get_config(), model_and_batch | values))


def measure(config: Config) -> Line:
    """Train for ten steps. Return the sizes of each part's output on the first batch, and of each parameter: before,
    and of the change; for a matrix's change also its norm."""
    built = build(config, jax.devices()[:1])
    rows, length = built.batch_shape[1:]
    text = text_of(config.data, config.model.vocab_size, length, rows)
    batches = StepBatches(text.train, text.mixture, config.seed, built.batch_shape, np.arange(rows), text.document_bos)
    graphdef, _ = split_model(config.model, built.dtype)

    @jax.jit
    def outputs(params: dict, tokens: Int[Array, "rows length"]) -> dict:
        record = nnx.capture(nnx.merge(graphdef, params), nnx.Intermediate, method_outputs=nnx.Intermediate)
        return nnx.to_pure_dict(record(tokens)[1])

    def arrays(params: dict) -> dict[str, np.ndarray]:
        calls = [(name.split(".__call__"), array) for name, array in named(outputs(params, probe)).items()]
        return jax.device_get(named(params) | {name[0]: array for name, array in calls if len(name) > 1})

    state, probe = built.create_state(), batches[0]["inputs"][0]
    before = arrays(state.params)
    for step in range(STEPS):
        state, _ = built.train_step(state, to_devices(batches[step], built.batch_shape, built.batch_sharding))
    after, sizes = arrays(state.params), {}
    for name, old in before.items():
        change = after[name] - old
        sizes[name] = {INITIAL: rms(old), CHANGE: rms(change)}
        if name.endswith("kernel"):
            sizes[name][NORM] = norm(change)
    return {"width": config.model.width, "depth": config.model.depth, "sizes": sizes}


def named(tree: dict) -> dict[str, Array]:
    """Return the leaves by their dotted paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def rms(array: Float[np.ndarray, "..."]) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def norm(matrix: Float[np.ndarray, "inputs outputs"]) -> float:
    """Return the largest factor by which the matrix changes a vector's RMS (arXiv:2310.17813)."""
    inputs, outputs = matrix.shape
    gram = matrix.T @ matrix if inputs > outputs else matrix @ matrix.T
    return float(np.sqrt(np.linalg.eigvalsh(gram)[-1] * inputs / outputs))


def by_kind(line: Line) -> dict[tuple[str, str], float]:
    """Return each quantity of a line by (quantity, kind), the RMS over all layers. A kind is a name without the
    layer's number."""
    values = defaultdict(list)
    for name, sizes in line["sizes"].items():
        for quantity, size in sizes.items():
            values[quantity, re.sub(r"\.\d+", "", name)].append(size)
    return {key: rms(np.array(sizes)) for key, sizes in values.items()}


def exponents(lines: Sequence[Line], along: str) -> dict[tuple[str, str], float]:
    """Return the exponent p of each quantity that is not zero, fitted as proportional to `along` (`width` or `depth`)
    to the power p."""
    kinds = [by_kind(line) for line in lines]
    logs = np.log([line[along] for line in lines])
    fit = lambda key: float(np.polyfit(logs, np.log([values[key] for values in kinds]), 1)[0])
    return {key: fit(key) for key in kinds[0] if all(values[key] > 0 for values in kinds)}


def table(series: dict[str, list[Line]]) -> str:
    """Return a table of exponents, and of the values at the smallest and the largest size."""
    fits = {along: exponents(lines, along) for along, lines in series.items()}
    rows = [
        "| quantity | part | width^p, p | at widths | depth^p, p | at depths |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for key in sorted(set().union(*fits.values())):
        cells = []
        for along, lines in series.items():
            first, last = (by_kind(line)[key] for line in (lines[0], lines[-1]))
            cells += [f"{fits[along].get(key, np.nan):+.2f}", f"{first:.2g} to {last:.2g}"]
        rows.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(rows)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    sizes = {"width": [(w, DEPTH) for w in arguments.widths], "depth": [(WIDTH, d) for d in arguments.depths]}
    lines = {}
    for size in dict.fromkeys([*sizes["width"], *sizes["depth"]]):
        lines[size] = measure(sized(*size))
        print(json.dumps(lines[size]), flush=True)
    print(table({along: [lines[size] for size in of_series] for along, of_series in sizes.items()}))
    return 0


if __name__ == "__main__":
    run_command(main)
