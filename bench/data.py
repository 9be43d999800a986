"""Speed of the data path: python -m bench.data. One JSON line: what prepare, plan and loader do in a second.

The loader is measured at d12's shapes (256 rows of 2048 tokens a step, two reading threads), from a warm page cache, up
to arrays on the device; the plan, on documents of log-normal length (median 400 tokens, as web text).

`--only=encoding`: a core's speed beside nanochat's tokenizer (`--nanochat=CHECKOUT`) and datatrove's pipeline (where it
is installed). `cores`: two workers beside one, and beside what the machine gives. `kills`: one preparation under
`--kills`. `memory`: of a worker, at its peak. `scale`: of each phase of a preparation of 1 TB, simulated by sizes.
"""

import json
import os
import tempfile
import time
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from bench import preparing
from configs.command_line import parse_arguments
from configs.schema import BatchConfig, DataConfig, FilePath, MeshConfig, Positive
from data.dataset import open_dataset
from data.loader import StepBatches, local_rows, train_batches
from data.mixture import Mixture, Stage
from data.packing import plan_rows
from data.prepare.preparation import Preparation, prepare
from hosts.runtime import run_command
from training.mesh import batch_shape, batch_sharding, make_mesh


@dataclass(frozen=True)
class Arguments:
    """Speed of the data path, as one JSON line."""

    source: str = "stdlib"
    """Raw text to prepare."""
    vocab_size: Positive[int] = 4096
    """Tokens of the tokenizer that is trained on it first, untimed."""
    documents: Positive[int] = 2_000_000
    """Documents to plan, or to simulate."""
    files: Positive[int] = 300_000
    """Files to simulate."""
    steps: Positive[int] = 20
    """Steps to load."""
    only: Literal["", "encoding", "cores", "kills", "memory", "scale"] = ""
    """Measure this instead."""
    megabytes: Positive[float] = 8.3
    """Of `source`, to encode; where it has fewer, again from its first."""
    nanochat: FilePath = ""
    """A checkout of nanochat to encode beside."""
    kills: Positive[int] = 50
    """SIGKILLs over one preparation."""


def measure(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """What `only` asks for."""
    text = arguments.source, arguments.megabytes, arguments.vocab_size
    if arguments.only == "encoding":
        return preparing.encoding(*text, arguments.nanochat, folder)
    if arguments.only == "cores":
        return preparing.cores(*text, folder)
    if arguments.only == "kills":
        return preparing.kills(*text, arguments.kills, folder)
    if arguments.only == "scale":
        return preparing.memory_at_scale(arguments.documents, arguments.files, folder)
    return preparing.memory(arguments.vocab_size, folder)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if arguments.only:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps({"measured": arguments.only, **measure(arguments, Path(name))}))
        return 0
    rates: dict[str, float | int | None] = {"cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Preparation(source=arguments.source, vocab_size=arguments.vocab_size, on_error="skip")
        prepare(settings, folder / "first")
        tokenizer = str(folder / "first" / "tokenizer")
        start = time.perf_counter()
        prepare(Preparation(source=arguments.source, tokenizer=tokenizer, on_error="skip"), folder / "second")
        seconds = time.perf_counter() - start
        dataset = open_dataset(str(folder / "second"), DataConfig(), arguments.vocab_size, folder / "cache")
        rates["prepare_tokens_per_second"] = round(sum(len(dataset.stream(p)) for p in ("train", "val")) / seconds)

        lengths = np.random.default_rng(0).lognormal(np.log(400), 1.0, arguments.documents).astype(np.int64) + 1
        start = time.perf_counter()
        plan = plan_rows("best_fit", np.cumsum(lengths) - lengths, int(lengths.sum()), 2048)
        rates["plan_documents_per_minute"] = round(60 * arguments.documents / (time.perf_counter() - start))
        rates["plan_padding"] = 1 - lengths.sum() / 2048 / (len(plan.rows) - 1)

        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        shape, sharding = batch_shape(BatchConfig(), mesh), batch_sharding(mesh)
        for packing in ("stream", "best_fit"):
            rows = dataset.rows("train", packing, shape[2], folder / "cache")
            steps = StepBatches(
                [rows], Mixture([Stage(0, (Fraction(1),))], shape[2]), 0, shape, local_rows(shape, sharding)
            )
            batches = train_batches(steps, sharding, DataConfig().workers)
            jax.block_until_ready([next(batches) for _ in range(3)])  # the files are in memory now, the threads awake
            start = time.perf_counter()
            for batch in islice(batches, arguments.steps):
                jax.block_until_ready(batch)
            seconds = time.perf_counter() - start
            rates[f"loader_{packing}_tokens_per_second"] = round(arguments.steps * np.prod(shape) / seconds)
    print(json.dumps(rates))
    return 0


if __name__ == "__main__":
    run_command(main)
