"""What a network is worth: python evaluate.py --run_dir=RUN (or --from=FOLDER), with --source or --tasks."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.progress import progress
from configs.schema import AnyPath, Config, FilePath, MeshConfig, Positive, Range, UserError
from data.dataset import open_text
from data.loader import held_out_batches
from data.tokenizer import TextTokenizer, load_tokenizer
from evaluation.benchmarks import Benchmarks, plot_core
from evaluation.benchmarks import plot as plot_tasks
from evaluation.bits_of_texts import compared, figures, in_words
from evaluation.bits_of_texts import plot as plot_bits
from evaluation.bits_per_byte import evaluate
from evaluation.core import READS, TIES, read_bundle
from evaluation.document_losses import DocumentLosses
from evaluation.documents import Source, digest, read_sources
from evaluation.generation import make_generate
from evaluation.item_log import append_to_log, open_log, to_lines
from evaluation.scorer import Scorer
from evaluation.table import as_table
from hosts.runtime import cache_dir, check_hosts_agree, on_first_process, run_command, start_jax
from interchange.init_from import architecture_of, config_of, is_network, read_params, require_same_network
from run.folder import load_run, record_of
from run.record import at_hand
from training.mesh import batch_devices, batch_sharding, make_mesh
from training.state import abstract_params, compute_dtype, params_sha256
from training.step import make_eval_step


@dataclass(frozen=True)
class Arguments:
    """Of a run's checkpoint, or of a network in a folder: validation loss and bits per byte, bits per byte of
    other text, or benchmarks. A table, or JSON."""

    run_dir: AnyPath = ""
    """Folder of the run, here or at gs://."""
    step: Positive[int] | None = None
    """The run's checkpoint of this step in place of the newest."""
    from_: Annotated[AnyPath, tyro.conf.arg(name="from")] = ""
    """In place of a run: a folder that export.py wrote, or a published nanochat in transformers' format; for `tasks` of
    lm-evaluation-harness, any causal network that transformers loads."""
    out: FilePath = ""
    """Where what is found by `source` or `tasks` goes. Default: the run's folder, or that of the network, on this
    machine."""
    tokens: Positive[int] | None = None
    """Tokens of the run's own held-out set. Default: its `eval.tokens`."""
    source: str = ""
    """Other text in place of the run's own held-out part: a file, a folder or a glob as data.prepare takes it, a
    dataset folder (its held-out part), or several with their shares: `0.7:DIR,0.3:DIR`."""
    documents: Positive[int] = 1000
    """Take at most so many documents of each source, always the same."""
    text_column: str = "text"
    """Of .jsonl and .parquet files of `source`."""
    against: AnyPath = ""
    """Folder of another run or network: both are compared on the documents of `source`, whatever their tokenizers."""
    tasks: str = ""
    """Benchmarks in place of held-out text: `core`, of the bundle that DCLM and nanochat use; or tasks of EleutherAI's
    lm-evaluation-harness by their names there: `hellaswag,arc_easy`. Each item's result is kept; the same command again
    continues where it was."""
    bundle: FilePath = ""
    """Folder of CORE's bundle: core.yaml, eval_meta_data.csv and eval_data/."""
    task_files: FilePath = ""
    """Folder of more task files (.yaml) for the harness."""
    items: Positive[int] | None = None
    """Take so many items of each task, always the same; default: all."""
    prompt_tokens: Annotated[int, Range(lambda n: n > 1, "a prompt has at least 2 tokens")] | None = None
    """A longer prompt loses its first tokens. Default: as many as the run's rows have; for `core` ten times as many, as
    nanochat. A token sees as many tokens back as the rows have, at most."""
    mesh: MeshConfig = MeshConfig()
    """Arrangement of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large for one."""
    json: bool = False
    """Print one line of JSON in place of a table."""


class Network(NamedTuple):
    """What is measured: of a run, or from a folder."""

    config: Config
    tokenizer: TextTokenizer
    params: dict
    facts: dict
    """Which parameters these are."""
    label: str

    @property
    def step(self) -> dict:
        """Of a run: `step`, for the JSON line."""
        return {name: value for name, value in self.facts.items() if name == "step"}

    @property
    def dtype(self) -> jnp.dtype:
        return compute_dtype(self.config.model, jax.default_backend())

    def scorer(self, mesh: Mesh, longest: int | None) -> Scorer:
        return Scorer(self.config.model, self.config.batch, self.dtype, mesh, longest)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    folder = arguments.run_dir or arguments.from_
    if not folder or (arguments.run_dir and arguments.from_):
        raise UserError("give one of them: --run_dir=RUN, or --from=FOLDER of a network")
    if not arguments.out and folder.startswith("gs://") and (arguments.tasks or arguments.source):
        raise UserError(f"--out=FOLDER is missing: {folder} is only read, and what is found is kept")
    given, folder = folder, str(at_hand(folder))
    if arguments.from_ and not is_network(folder):
        raise UserError(f"--from={given} holds no network (no *.safetensors); of a run, give --run_dir")
    if arguments.from_ and arguments.step:
        raise UserError(f"--step={arguments.step} is of a run's checkpoints; --from={given} holds one network")
    if arguments.from_ and not (arguments.tasks or arguments.source):
        raise UserError("--from needs --source=PATH or --tasks: a network in a folder has no text of its own")
    if "core" in arguments.tasks.split(",") and arguments.tasks != "core":
        raise UserError("core is measured by itself, and lm-evaluation-harness' tasks by another command: --tasks=core")
    if arguments.tasks == "core" and not arguments.bundle:
        raise UserError("--tasks=core needs --bundle=DIR, the folder that holds core.yaml")
    if arguments.tasks and arguments.source:
        raise UserError("--tasks and --source are two evaluations; give one of them at a time")
    if arguments.against and not arguments.source:
        raise UserError("--against compares two networks on the same text; give it: --source=PATH")
    of_tasks = core if arguments.tasks == "core" else harness
    evaluation = texts if arguments.source else of_tasks if arguments.tasks else held_out
    require_options_of(evaluation, arguments)
    start_jax()
    mesh = make_mesh(arguments.mesh)
    results = {"from" if arguments.from_ else "run_dir": given, **evaluation(arguments, folder, mesh)}
    print(json.dumps(results) if arguments.json else as_table(results))
    return 0


def require_options_of(evaluation: Callable, arguments: Arguments) -> None:
    """UserError for an option that this evaluation would not look at."""
    kind, *looked_at = {
        held_out: ("the run's own held-out text", "tokens"),
        texts: ("other text (--source)", "source", "documents", "text_column", "against", "out"),
        core: ("CORE (--tasks=core)", "tasks", "bundle", "items", "prompt_tokens", "out"),
        harness: ("lm-evaluation-harness' --tasks", "tasks", "task_files", "items", "prompt_tokens", "out"),
    }[evaluation]
    given = {name for name, value in vars(arguments).items() if value != getattr(Arguments, name)}
    if others := sorted(given - {"run_dir", "from_", "step", "mesh", "json", *looked_at}):
        raise UserError(f"{', '.join(f'--{name}' for name in others)}: not an option of an evaluation by {kind}")


def load(folder: str, mesh: Mesh, step: int | None = None) -> Network:
    """Return the network of a run's checkpoint, the newest without a `step`, or in a folder."""
    tokenizer = tokenizer_of(folder)
    if is_network(folder):
        config = config_of(folder)
        require_same_network(config)
        params = read_params(config, abstract_params(config.model, mesh))
        return Network(config, tokenizer, params, {"params_sha256": params_sha256(params, config.model)}, "network")
    run = load_run(folder, mesh, step)
    facts = {"step": run.step, "params_sha256": params_sha256(run.params, run.config.model)}
    return Network(run.config, tokenizer, run.params, facts, f"step_{run.step}")


def tokenizer_of(folder: str) -> TextTokenizer:
    """UserError where there is no run and no network."""
    if is_network(folder):
        return load_tokenizer(folder)
    record_of(folder)
    return load_tokenizer(Path(folder) / "tokenizer")


def held_out(arguments: Arguments, folder: str, mesh: Mesh) -> dict:
    """Validation loss and bits per byte of the run's own text."""
    run = load_run(folder, mesh, arguments.step)
    config = run.config
    rows = config.batch.rows_per_device * batch_devices(mesh)
    shape = (1, rows, config.batch.sequence_length)
    text = open_text(config.data, config.model.vocab_size, shape[2], 1, cache_dir())
    if text.fingerprint != run.dataset:
        raise UserError(
            f"{config.data.source} is not the text that {folder} was trained on: its fingerprint is "
            f"{text.fingerprint}, the run's {run.dataset}; evaluate where that text is"
        )
    batches, text_bytes = held_out_batches(
        text.val,
        text.weights,
        arguments.tokens or config.eval.tokens,
        text.tokenizer.token_bytes,
        shape,
        batch_sharding(mesh),
        text.document_bos,
    )
    eval_step = make_eval_step(config.model, compute_dtype(config.model, jax.default_backend()), mesh)
    watched = partial(progress, desc="evaluating", unit="batches", disable=jax.process_index() > 0)
    return {"step": run.step, **evaluate(eval_step, run.params, batches, text_bytes, watched)}


def texts(arguments: Arguments, folder: str, mesh: Mesh) -> dict:
    """Bits per byte of other text, and how another network compares; in the folder a line a document, all figures, and
    a picture of them."""
    first, against = jax.process_index() == 0, arguments.against
    other = against and str(at_hand(against))
    for one in (folder, *([other] if other else [])):
        tokenizer_of(one)  # a mistake is told before any compute
    tokenizer = Path(folder) / ("" if is_network(folder) else "tokenizer")
    sources = read_sources(arguments.source, arguments.documents, arguments.text_column, tokenizer, cache_dir())
    text = digest(sources)
    check_hosts_agree("their text", text)
    ours = of_documents(folder, arguments.step, arguments.out or folder, sources, text, mesh)
    ours = ours._replace(name=ours.name.replace(folder, arguments.run_dir or arguments.from_, 1))
    found = {ours.name: figures(sources, ours.lines)}
    results = {**ours.step, "skipped": sum(source.skipped for source in sources), **found[ours.name]}
    if other:
        # What is found of a run in a bucket stays here.
        out = str(Path(arguments.out or folder) / "against") if against.startswith("gs://") else other
        theirs = of_documents(other, None, out, sources, text, mesh)
        theirs = theirs._replace(name=theirs.name.replace(other, against, 1))
        found[theirs.name] = figures(sources, theirs.lines)
        comparison = compared(sources, ours.lines, theirs.lines, same=ours.network == theirs.network)
        results |= {"against": {"run_dir": against, **theirs.step, **comparison}}
        if first:
            print(in_words(ours.name, theirs.name, comparison), file=sys.stderr)
    if first:
        write_whole(ours.place / "bits_per_byte.json", json.dumps({"text": text, **results}, indent=2) + "\n")
        plot_bits(found, ", ".join(source.name for source in sources), ours.place / "bits_per_byte.png")
    return {name: value for name, value in results.items() if not name.startswith("by_")}


class OfDocuments(NamedTuple):
    """What a network makes of documents."""

    name: str
    """The network's, for people."""
    step: dict
    network: tuple[str, str]
    """SHA-256 of its parameters and of its tokenizer."""
    place: Path
    """The folder of what is found."""
    lines: list[dict]
    """One for each document."""


def of_documents(
    folder: str, step: int | None, out: FilePath, sources: list[Source], text: str, mesh: Mesh
) -> OfDocuments:
    """Return what a network makes of the sources' documents, from its log as far as that goes."""
    network = load(folder, mesh, step)
    config = network.config
    measure = DocumentLosses(network.tokenizer, config.model, config.batch, network.dtype, mesh)
    place = Path(out) / "texts" / f"{network.label}_{text[:8]}"
    done, record = log_of(place / "documents.jsonl", measure.facts | {"text": text} | network.facts)
    name = f"{folder} ({network.label.replace('_', ' ')})"
    hashes = network.facts["params_sha256"], network.tokenizer.sha256
    return OfDocuments(name, network.step, hashes, place, measure(network.params, sources, done, record))


def log_of(path: Path, facts: dict) -> tuple[list[dict], Callable[[list[dict]], None]]:
    """The lines that an earlier start left in a log, and what adds more: in the first process."""
    done = on_first_process(lambda: open_log(path, facts))
    return done, partial(append_to_log, path) if jax.process_index() == 0 else lambda lines: None


def core(arguments: Arguments, folder: str, mesh: Mesh) -> dict:
    """CORE and its tasks' figures; in the folder a line an item, the figures, and a picture of them."""
    tasks = read_bundle(arguments.bundle, arguments.items)
    network = load(folder, mesh, arguments.step)
    first = jax.process_index() == 0
    longest = arguments.prompt_tokens or READS * network.config.batch.sequence_length
    benchmarks = Benchmarks(tasks, network.tokenizer, network.scorer(mesh, longest))
    check_hosts_agree("their bundle", json.dumps(benchmarks.facts))
    facts = benchmarks.facts | network.facts
    name = network.label + (f"_items_{arguments.items}" if arguments.items else "")
    place = Path(arguments.out or folder) / "core" / name
    done, record = log_of(place / "items.jsonl", facts)
    say = partial(print, file=sys.stderr) if first else lambda text: None
    results = benchmarks(network.params, done, record, say)
    if first:
        write_whole(place / "core.json", json.dumps(facts | results, indent=2) + "\n")
        plot_core(results, f"{network.config.name}, {network.label.replace('_', ' ')}", place / "core.png")
    return {**network.step, **results}


def harness(arguments: Arguments, folder: str, mesh: Mesh) -> dict:
    """Figures of lm-evaluation-harness' tasks; in the folder a line a request, a line an item, the figures, and a
    picture of them."""
    from evaluation.harness import HarnessNetwork
    from evaluation.harness_tasks import load_tasks, measure, others_network, points

    loaded = load_tasks(arguments.tasks.split(","), arguments.task_files)
    out, first = Path(arguments.out or folder) / "harness", jax.process_index() == 0
    if is_network(folder) and architecture_of(folder) not in ("nanochat", "tokensum"):
        out.mkdir(parents=True, exist_ok=True)
        label, step, facts, tie = "network", {}, {}, TIES["float32"]
        model, cache = others_network(folder), str(out / "answers")
    else:
        network = load(folder, mesh, arguments.step)
        label, step, cache, tie = network.label, network.step, None, TIES[network.dtype.name]
        scorer = network.scorer(mesh, arguments.prompt_tokens)
        facts = {"tokenizer": network.tokenizer.sha256} | scorer.facts | network.facts
        done, record = log_of(out / label / "requests.jsonl", facts)
        generate = make_generate(network.config.model, network.dtype, mesh)
        model = HarnessNetwork(network.params, network.tokenizer, scorer, generate, done, record, check_hosts_agree)
    results, lines = measure(model, loaded, arguments.items, tie, cache)
    if first:
        name = "+".join(sorted(loaded["tasks"]))[:100] + (f"_items_{arguments.items}" if arguments.items else "")
        place = out / label / name
        place.mkdir(parents=True, exist_ok=True)
        for task, of_task in lines.items():
            write_whole(place / f"{task}.jsonl", to_lines(of_task))
        write_whole(place / "tasks.json", json.dumps(facts | {"tasks": results}, indent=2) + "\n")
        if drawn := points(results):
            plot_tasks(drawn, f"{Path(folder).resolve().name}, {label.replace('_', ' ')}", place / "tasks.png")
    return {**step, "tasks": results}


if __name__ == "__main__":
    run_command(main)
