"""Evaluate a run's network: python evaluate.py --run_dir=RUN, with --source or --tasks."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import AnyPath, FilePath, MeshConfig, Positive
from options.validation import PROGRAMS
from system.errors import UserError
from system.files import in_bucket
from system.progress import progress


@dataclass(frozen=True)
class Arguments:
    """Evaluate a run's checkpoint: validation loss and bits per byte, bits per byte of other text, or benchmarks. Print
    a table, or JSON."""

    run_dir: AnyPath
    """Folder of the run, here or at gs://."""
    step: Positive[int] | None = None
    """The step of the run's checkpoint; default: the newest."""
    out: FilePath = ""
    """Folder for the results of `tasks`. Default: the run's, if it is on this machine."""
    tokens: Positive[int] | None = None
    """Tokens of the run's own held-out set. Default: its `eval.tokens`."""
    source: str = ""
    """Text to evaluate instead of the run's own held-out part: a file, a folder or a glob as for data.prepare, or a
    dataset folder (its held-out part)."""
    documents: Positive[int] = 1000
    """Take at most this many documents of `source`, always the same."""
    text_column: str = "text"
    """Column with the text, in .jsonl, .parquet, .csv and .tsv files of `source`."""
    text_extensions: str = ""
    """More extensions of text files in `source`: `.rst,.tex`."""
    against: AnyPath = ""
    """Folder of another run: both are compared on the documents of `source`, whatever their tokenizers."""
    tasks: str = ""
    """A benchmark instead of held-out text: `core`, from the bundle that DCLM and nanochat use, or `chatcore`, for a
    network trained on conversations; `chatcore4` is the latter without its programs. Each item's result is kept; the
    same command resumes."""
    bundle: FilePath = ""
    """Folder of CORE's bundle: core.yaml, eval_meta_data.csv and eval_data/. For `chatcore`: arc/, mmlu/, gsm8k/ and
    humaneval/, as in docs/evaluation.md."""
    run_code: bool = False
    """Let `chatcore` run the programs that the network writes, in processes with limits against accidents."""
    items: Positive[int] | None = None
    """Take this many items of each task, always the same; default: all."""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large for one."""
    json: bool = False
    """Print one line of JSON instead of a table."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import jax
import numpy as np
from jax.sharding import Mesh

from data.dataset import Text, open_text, shortest
from data.held_out import HeldOut, read_held_out
from data.prepare.corpus import Document
from evaluation.benchmark import BENCHMARKS, benchmark_of, read_tasks
from evaluation.core import Task
from evaluation.evaluator import evaluate
from evaluation.results import ItemLog, as_table, plot_accuracies, write_json
from evaluation.texts import bits_of, compared, figures, read_documents
from hosts.distributed import on_every_process
from hosts.runtime import cache_dir, run_command, start_jax
from run.config_json import config_of_run
from run.folder import folder_to_read
from run.network import Network, open_network
from training.mesh import batch_devices, batch_sharding, make_mesh
from training.state import params_sha256
from training.step import make_eval_step


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    evaluation = chosen(arguments)
    start_jax()

    def require_runs() -> None:
        for run_dir in filter(None, (arguments.run_dir, arguments.against)):
            facts, _ = config_of_run(folder_to_read(run_dir))
            if evaluation is held_out and not facts["dataset"]:
                raise UserError(f"{run_dir} has no text of its own: it was converted; give --source=PATH or --tasks")

    on_every_process("its runs", require_runs)  # a mistake is reported before any compute
    results = {"run_dir": arguments.run_dir, **evaluation(arguments, make_mesh(arguments.mesh))}
    if jax.process_index() == 0:
        print(json.dumps(results) if arguments.json else as_table(results))
    return 0


def chosen(arguments: Arguments) -> Callable[[Arguments, Mesh], dict[str, Any]]:
    """Return the requested evaluation. Raise UserError for options that contradict each other, or that it ignores."""
    run_dir, tasks, source = arguments.run_dir, arguments.tasks, arguments.source
    evaluation = texts if source else core if tasks else held_out
    mistakes = [
        (
            evaluation is core and in_bucket(run_dir) and not arguments.out,
            f"--out=FOLDER is missing: results are not written to {run_dir}",
        ),
        (
            tasks and tasks not in BENCHMARKS,
            f"--tasks={tasks} is not one of {', '.join(BENCHMARKS)}; for others: export.py --format=hf, then lm_eval "
            "--model hf",
        ),
        (
            tasks == "chatcore" and not arguments.run_code,
            f"--tasks=chatcore: {PROGRAMS}: add --run_code, or take --tasks=chatcore4, which leaves them out",
        ),
        (evaluation is core and not arguments.bundle, f"--tasks={tasks} needs --bundle=DIR, the folder of its items"),
    ]
    for is_made, message in mistakes:
        if is_made:
            raise UserError(message)
    kind, *looked_at = {
        held_out: ("the run's own held-out text", "tokens"),
        texts: ("other text (--source)", "source", "documents", "text_column", "text_extensions", "against"),
        core: (f"--tasks={tasks}", "tasks", "bundle", "items", "out", "run_code"),
    }[evaluation]
    options = {name: value for name, value in vars(arguments).items() if name != "run_dir"}
    given = {name for name, value in options.items() if value != getattr(Arguments, name)}
    if others := sorted(given - {"step", "mesh", "json", *looked_at}):
        raise UserError(f"{', '.join(f'--{name}' for name in others)}: not an option of an evaluation with {kind}")
    return evaluation


def held_out(arguments: Arguments, mesh: Mesh) -> dict[str, Any]:
    """Return validation loss and bits per byte of the run's own text. Raise UserError if the text here differs."""
    run_dir = arguments.run_dir
    network = open_network(run_dir, mesh, arguments.step)
    config = network.config
    shape = (1, config.batch.rows * batch_devices(mesh), config.batch.sequence_length)

    def read() -> tuple[Text, HeldOut]:
        text = open_text(config.data, config.model.vocab_size, shape[2], 1, cache_dir())
        if text.fingerprint != network.dataset:
            raise UserError(
                f"{config.data.source} is not the text that {run_dir} was trained on: its fingerprint is "
                f"{text.fingerprint}, the run's {network.dataset}; evaluate where that text is"
            )
        tokens, sharding = arguments.tokens or config.eval.tokens, batch_sharding(mesh)
        rows = read_held_out(text.val, text.weights, tokens, text.tokenizer, shape, sharding, text.document_bos)
        return text, rows

    text, rows = on_every_process("the run's text", read)
    text_bytes = rows.text_bytes()
    watched = partial(progress, desc="evaluating", unit="batches", disable=jax.process_index() > 0)
    eval_step = make_eval_step(network.sharded)
    results = evaluate(eval_step, network.params, rows.batches, text_bytes, watched, shortest(text.names))
    if not math.isfinite(results["val_loss"]):
        raise UserError(f"the network of {run_dir} is not usable: its validation loss is {results['val_loss']}")
    return {"step": network.step, **results}


def texts(arguments: Arguments, mesh: Mesh) -> dict[str, Any]:
    """Return bits per byte of other text, and a comparison with another network."""

    def read() -> tuple[list[Document], int]:
        return read_documents(
            arguments.source, arguments.documents, arguments.text_column, cache_dir(), arguments.text_extensions
        )

    documents, skipped = on_every_process("their text", read)
    sizes = [len(document.text.encode()) for document in documents]

    def measured(run_dir: str, step: int | None) -> tuple[int, np.ndarray]:
        network = open_network(run_dir, mesh, step)
        return network.step, bits_of(network, run_dir, documents)

    step, ours = measured(arguments.run_dir, arguments.step)
    results = {"step": step, **figures(ours, sizes), "skipped": skipped}
    if other := arguments.against:
        step, theirs = measured(other, None)
        results["against"] = {"run_dir": other, "step": step, **compared(ours, theirs, sizes)}
    return results


def core(arguments: Arguments, mesh: Mesh) -> dict[str, Any]:
    """Return CORE or ChatCORE, and its tasks' figures."""
    benchmark = arguments.tasks
    tasks = read_tasks(benchmark, arguments.bundle, arguments.items)
    network = open_network(arguments.run_dir, mesh, arguments.step)
    name = f"step_{network.step}" + (f"_items_{arguments.items}" if arguments.items else "")
    out = Path(arguments.out or arguments.run_dir) / benchmark / name
    return {"step": network.step, **evaluate_core(network, tasks, out, benchmark)}


def evaluate_core(network: Network, tasks: Sequence[Task], folder: Path, benchmark: str = "core") -> dict[str, Any]:
    """Return `figures`. Write a line per item, the figures, and a picture of them to `folder`. Items of an earlier
    start are not scored again. Every process must call it."""
    core = benchmark_of(benchmark, tasks, network)
    digest = params_sha256(network.params, network.config.model)
    facts = {**core.facts, "step": network.step, "params_sha256": digest}
    say = partial(print, file=sys.stderr) if jax.process_index() == 0 else lambda text: None
    results = core(network.params, ItemLog(folder / "items.jsonl", facts), say)
    if jax.process_index() == 0:
        write_json(folder / f"{benchmark}.json", facts | results)
        low, high = results[f"{benchmark}_interval"]
        figure = f"{benchmark.upper()} {results[benchmark]:.4f} ({low:.4f} to {high:.4f})"
        title = f"{network.config.name}, step {network.step}: {figure}"
        plot_accuracies(results["tasks"], title, folder / f"{benchmark}.png")
    return results


if __name__ == "__main__":
    run_command(main)
