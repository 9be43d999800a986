"""What is in a dataset, and what a step sees: python -m data.inspect DIR_OR_RUN [--step=N]."""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.backend_bases import FigureCanvasBase

from configs.command_line import config_from_json
from configs.ramp import Ramp
from configs.schema import BatchConfig, Config, DataConfig, Packing, UserError
from data.dataset import Dataset, open_dataset, open_text, split_sources
from data.loader import row_sequence
from data.packing import Row
from data.record import read_record
from data.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Arguments:
    """What is in a dataset, and what a step sees."""

    path: Annotated[str, tyro.conf.Positional]
    """A dataset folder, or a run's, whose own text, seed, packing and sizes are used then."""
    step: int | None = None
    """Show the batch of this step (the first is 0). Of a run: what it saw there, after rollbacks too."""
    rows: int = 4
    """Rows of the batch that are shown."""
    packing: Packing = "stream"
    """Of a dataset folder: how its rows are made."""
    sequence_length: int = 2048
    """Of a dataset folder: tokens of a row."""
    tokens_per_step: int = 524_288
    """Of a dataset folder: tokens of a step."""
    seed: int = 0
    """Of a dataset folder: seed of the order."""
    tokenizer: str = ""
    """Of a folder of .bin shards without a dataset.json: what their tokens mean."""
    picture: str = ""
    """Where the histogram of document lengths goes; by default into the folder, as document-lengths.png."""


def describe(dataset: Dataset) -> tuple[str, np.ndarray]:
    """Counts of a dataset as text, and the length in tokens of each document to train on."""
    lines, lengths = [f"{dataset.folder}  (fingerprint {dataset.fingerprint})"], {}
    for part in ("train", "val"):
        stream = dataset.stream(part)
        found = lengths[part] = np.diff(dataset.document_starts(part), append=len(stream))
        text_bytes = sum(int(dataset.tokenizer.token_bytes[shard].sum()) for shard in stream.shards)
        lines.append(
            f"{part:5}  {len(found):,} documents, {len(stream):,} tokens, {text_bytes:,} bytes, in "
            f"{len(stream.shards)} shard(s); tokens a document: median {np.median(found):,.0f}, "
            f"90% under {np.quantile(found, 0.9):,.0f}, longest {found.max():,}"
        )
    lines.append(f"tokenizer of {dataset.tokenizer.vocab_size:,} tokens, BOS {dataset.tokenizer.bos}")
    if (dataset.folder / "dataset.json").exists():
        facts = read_record(dataset.folder)
        skipped = ", ".join(f"{count} {why}" for why, count in facts.get("skipped", {}).items()) or "nothing"
        lines.append(f"made from {facts['made_from']['source']}; skipped: {skipped}")
    return "\n".join(lines), lengths["train"]


def describe_row(row: Row, tokenizer: TextTokenizer) -> str:
    """A row's documents, one a line: positions, targets that count, and how the text begins and ends."""
    starts = np.union1d(0, np.flatnonzero(row["inputs"] == tokenizer.bos))
    padding = len(row["weights"]) - np.flatnonzero(row["weights"]).max(initial=-1) - 1
    lines = []
    for start, stop in zip(starts, [*starts[1:], len(row["inputs"])]):
        if start < len(row["inputs"]) - padding:
            text = tokenizer.decode(row["inputs"][start:stop].tolist())
            shown = repr(text) if len(text) <= 100 else f"{text[:60]!r} ... {text[-40:]!r}"
            count = np.count_nonzero(row["weights"][start:stop])
            begins = "" if row["inputs"][start] == tokenizer.bos else "goes on: "
            lines.append(f"  {start:6}..{stop - 1:<6} {count:6} targets  {begins}{shown}")
    return "\n".join([*lines, *([f"  {padding} positions of padding"] if padding else [])])


def plot_lengths(lengths: np.ndarray, path: Path) -> None:
    """A histogram of document lengths, and of the tokens that lie in documents of each length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    bins = np.geomspace(1, lengths.max() + 1, 50)
    axes.hist(lengths, bins.tolist(), weights=np.full(len(lengths), 1 / len(lengths)), alpha=0.6, label="documents")
    axes.hist(lengths, bins.tolist(), weights=lengths / lengths.sum(), alpha=0.6, label="tokens")
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="share", title=f"{len(lengths):,} documents")
    axes.legend()
    figure.savefig(path, dpi=150)


def _validate(arguments: Arguments) -> None:
    def require(condition: bool, name: str, expectation: str) -> None:
        if not condition:
            raise UserError(f"--{name}={getattr(arguments, name)} cannot work: {expectation}")

    require(arguments.step is None or 0 <= arguments.step < 2**31, "step", "the first is 0, the last below 2^31")
    require(arguments.rows > 0, "rows", "it must be positive")
    require(arguments.sequence_length > 1, "sequence_length", "a row has at least 2 tokens")
    at_least = f"a step has at least one row, of --sequence_length={arguments.sequence_length} tokens"
    require(arguments.tokens_per_step >= arguments.sequence_length, "tokens_per_step", at_least)
    require(0 <= arguments.seed < 2**32, "seed", "it must not be negative, and below 2^32")
    suffix = Path(arguments.picture).suffix.lower().removeprefix(".")
    known = FigureCanvasBase.get_supported_filetypes()
    require(not arguments.picture or suffix in known, "picture", f"its suffix must be one of {', '.join(known)}")


def main() -> int:
    from run.events import Events, batch_of
    from run.runtime import cache_dir

    arguments = tyro.cli(Arguments, description=__doc__, use_underscores=True)
    _validate(arguments)
    record = Path(arguments.path) / "config.json"
    if record.exists():
        try:
            kept = json.loads(record.read_bytes())["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{record} is no run's record: {type(error).__name__}: {error}") from error
        config = config_from_json(json.dumps(kept))
    else:
        batch = BatchConfig(arguments.sequence_length, arguments.tokens_per_step)
        source = DataConfig(arguments.path, arguments.tokenizer, packing=arguments.packing)
        config = Config(name="inspect", seed=arguments.seed, data=source, batch=batch)
        if not Path(arguments.path).is_dir():
            raise UserError(f"{arguments.path} is no folder: give a dataset's, or a run's")
    shares, sources = split_sources(config.data.source)
    found = [open_dataset(source, config.data, config.model.vocab_size, cache_dir()) for source in sources]
    for share, dataset in zip(shares, found):
        described, lengths = describe(dataset)
        print(described + (f"\n{share:.1%} of the rows" if len(found) > 1 else ""))
    picture = Path(arguments.picture or Path(arguments.path, "document-lengths.png"))
    try:
        plot_lengths(lengths, picture)
        print(f"document lengths of {found[-1].folder}: {picture}")
    except OSError as error:
        if arguments.picture:
            raise UserError(f"--picture={picture} cannot be written: {error}") from error
        print(f"{picture} cannot be written ({error.strerror}); give --picture=PATH", file=sys.stderr)
    if arguments.step is None:
        return 0
    length = config.batch.sequence_length
    position, tokens = batch_of(Events(arguments.path).read(), arguments.step, Ramp.of(config.batch))
    first, size = position // length, tokens // length
    vocab_size = max(config.model.vocab_size, found[0].tokenizer.vocab_size)  # a dataset folder knows its own
    text = open_text(config.data, vocab_size, length, size, cache_dir())
    sequence = row_sequence(text.train, text.weights, config.seed)
    shown = min(arguments.rows, size)
    print(f"step {arguments.step}: {size} rows of {length} tokens, of which {shown} follow")
    for i in range(shown):
        part, number = sequence[first + i]
        row = text.train[part][number]
        print(f"row {i} of the step, row {number:,} of {sources[part]}:\n{describe_row(row, text.tokenizer)}")
    return 0


if __name__ == "__main__":
    from run.runtime import run_command

    run_command(main)
