"""What a run's newest checkpoint is worth: python evaluate.py --run_dir=RUN, or with --source or --tasks=core."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
from jax.sharding import Mesh

from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.schema import FilePath, MeshConfig, Positive, Range, UserError
from data.dataset import open_text
from data.loader import held_out_batches
from data.tokenizer import load_tokenizer
from evaluation.benchmarks import Benchmarks
from evaluation.benchmarks import plot as plot_core
from evaluation.bits_of_texts import compared, figures, in_words
from evaluation.bits_of_texts import plot as plot_bits
from evaluation.bits_per_byte import evaluate
from evaluation.core import read_bundle
from evaluation.document_losses import DocumentLosses
from evaluation.documents import Source, digest, read_sources
from evaluation.log import append_to_log, open_log
from run.folder import load_run, record_of
from run.runtime import cache_dir, check_hosts_agree, on_first_process, run_command, start_jax
from training.mesh import batch_sharding, make_mesh
from training.state import compute_dtype, params_sha256
from training.step import make_eval_step


@dataclass(frozen=True)
class Arguments:
    """Of a run's newest checkpoint: validation loss and bits per byte, bits per byte of other text, or benchmarks. One
    JSON line."""

    run_dir: FilePath
    """Folder of the run."""
    tokens: Positive[int] | None = None
    """Tokens of the held-out set. Default: the run's own `eval.tokens`."""
    source: str = ""
    """Other text in place of the run's own held-out part: a file, a folder or a glob as data.prepare takes it, a
    dataset folder (its held-out part), or several with their shares: `0.7:DIR,0.3:DIR`."""
    documents: Positive[int] = 1000
    """Take at most so many documents of each source, always the same."""
    text_column: str = "text"
    """Of .jsonl and .parquet files of `source`."""
    against: FilePath = ""
    """Folder of another run: the two are compared on the documents of `source`, whatever their tokenizers."""
    tasks: str = ""
    """Benchmarks in place of held-out text: `core`, of the bundle that DCLM and nanochat use. Each item's result goes
    to the run's folder under core/; the same command again continues there."""
    bundle: FilePath = ""
    """Folder of that bundle: core.yaml, eval_meta_data.csv and eval_data/."""
    items: Positive[int] | None = None
    """Take so many items of each task, always the same; default: all."""
    prompt_tokens: Annotated[int, Range(lambda n: n > 1, "a prompt has at least 2 tokens")] | None = None
    """A longer prompt loses its first tokens. Default: as many as the run's rows have. (nanochat cuts the prompts of
    networks that have a `max_seq_len`; its own read ten times their rows.)"""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large for one."""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if arguments.tasks not in ("", "core"):
        raise UserError(f"--tasks={arguments.tasks} cannot work: core is the only benchmark")
    if arguments.tasks and not arguments.bundle:
        raise UserError("--tasks=core needs --bundle=DIR, the folder that holds core.yaml")
    if arguments.tasks and arguments.source:
        raise UserError("--tasks and --source are two evaluations; give one of them at a time")
    if arguments.against and not arguments.source:
        raise UserError("--against compares two runs on the same text; give it: --source=PATH")
    start_jax()
    mesh = make_mesh(arguments.mesh)
    evaluation = texts if arguments.source else core if arguments.tasks else held_out
    print(json.dumps({"run_dir": arguments.run_dir, **evaluation(arguments, mesh)}))
    return 0


def held_out(arguments: Arguments, mesh: Mesh) -> dict:
    """Validation loss and bits per byte of the run's own text."""
    run = load_run(arguments.run_dir, mesh)
    config = run.config
    rows = config.batch.rows_per_device * mesh.shape["data"] * mesh.shape["fsdp"]
    shape = (1, rows, config.batch.sequence_length)
    text = open_text(config.data, config.model.vocab_size, shape[2], 1, cache_dir())
    if text.fingerprint != run.dataset:
        raise UserError(
            f"{config.data.source} is not the text that {arguments.run_dir} was trained on: its fingerprint is "
            f"{text.fingerprint}, the run's {run.dataset}; evaluate where that text is"
        )
    batches, text_bytes = held_out_batches(
        text.val,
        text.weights,
        arguments.tokens or config.eval.tokens,
        text.tokenizer.token_bytes,
        shape,
        batch_sharding(mesh),
        text.tokenizer.bos if config.data.mask_documents else None,
    )
    eval_step = make_eval_step(config.model, compute_dtype(config.model, jax.default_backend()), mesh)
    return {"step": run.step, **evaluate(eval_step, run.params, batches, text_bytes)}


def texts(arguments: Arguments, mesh: Mesh) -> dict:
    """Bits per byte of other text, and how another run compares; in the run's folder a line a document, all figures,
    and a picture of them."""
    first, run_dirs = jax.process_index() == 0, [arguments.run_dir, *([arguments.against] if arguments.against else [])]
    for run_dir in run_dirs:
        record_of(run_dir)  # a mistake is told before any compute
    tokenizer = Path(arguments.run_dir) / "tokenizer"
    sources = read_sources(arguments.source, arguments.documents, arguments.text_column, tokenizer, cache_dir())
    text = digest(sources)
    check_hosts_agree("their text", text)
    measured = {run_dir: of_documents(run_dir, sources, text, mesh) for run_dir in run_dirs}
    step, folder, lines = measured[arguments.run_dir]
    found = {run_dir: figures(sources, lines) for run_dir, (_, _, lines) in measured.items()}
    results = {"step": step, "skipped": sum(source.skipped for source in sources), **found[arguments.run_dir]}
    if arguments.against:
        comparison = compared(sources, lines, measured[arguments.against][2])
        results |= {"against": {"run_dir": arguments.against, "step": measured[arguments.against][0], **comparison}}
        if first:
            print(in_words(arguments.run_dir, arguments.against, comparison), file=sys.stderr)
    if first:
        write_whole(folder / "bits_per_byte.json", json.dumps({"text": text, **results}, indent=2) + "\n")
        plot_bits(found, folder / "bits_per_byte.png")
    return {name: value for name, value in results.items() if not name.startswith("by_")}


def of_documents(run_dir: str, sources: list[Source], text: str, mesh: Mesh) -> tuple[int, Path, list[dict]]:
    """A run's step, the folder of what is found of it, and a line for each document."""
    run = load_run(run_dir, mesh)
    dtype = compute_dtype(run.config.model, jax.default_backend())
    tokenizer = load_tokenizer(Path(run_dir) / "tokenizer")
    measure = DocumentLosses(tokenizer, run.config.model, run.config.batch, dtype, mesh)
    facts = measure.facts | {"text": text, "step": run.step, "params_sha256": params_sha256(run.params)}
    folder = Path(run_dir) / "texts" / f"step_{run.step}_{text[:8]}"
    log = folder / "documents.jsonl"
    done = on_first_process(lambda: open_log(log, facts))
    record = partial(append_to_log, log) if jax.process_index() == 0 else lambda lines: None
    return run.step, folder, measure(run.params, sources, done, record)


def core(arguments: Arguments, mesh: Mesh) -> dict:
    """CORE and its tasks' figures; in the run's folder a line an item, the figures, and a picture of them."""
    run = load_run(arguments.run_dir, mesh)
    config, first = run.config, jax.process_index() == 0
    benchmarks = Benchmarks(
        read_bundle(arguments.bundle, arguments.items),
        load_tokenizer(Path(arguments.run_dir) / "tokenizer"),
        config.model,
        config.batch,
        compute_dtype(config.model, jax.default_backend()),
        mesh,
        arguments.prompt_tokens,
    )
    check_hosts_agree("their bundle", json.dumps(benchmarks.facts))
    facts = benchmarks.facts | {"step": run.step, "params_sha256": params_sha256(run.params)}
    name = f"step_{run.step}" + (f"_items_{arguments.items}" if arguments.items else "")
    folder = Path(arguments.run_dir) / "core" / name
    log = folder / "items.jsonl"
    done = on_first_process(lambda: open_log(log, facts))
    results = benchmarks(
        run.params,
        done,
        record=partial(append_to_log, log) if first else lambda lines: None,
        say=partial(print, file=sys.stderr) if first else lambda text: None,
    )
    if first:
        write_whole(folder / "core.json", json.dumps(facts | results, indent=2) + "\n")
        plot_core(results, f"{config.name}, step {run.step}", folder / "core.png")
    return {"step": run.step, **results}


if __name__ == "__main__":
    run_command(main)
