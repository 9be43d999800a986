"""Show the contents of a dataset, as text and as a page, or the batch of a step: python -m tools.dataset DIR_OR_RUN."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from msgspec import Meta

from configs.command_line import parse_arguments
from configs.files import write_whole
from configs.schema import BatchConfig, Config, DataConfig, FilePath, Packing, Positive, UserError
from data.dataset import open_text, shortest
from data.dataset_folder import open_dataset
from data.loader import RowSequence
from data.mixture import Mixture, read_source
from data.packing import Row
from data.tokenizer import TextTokenizer
from hosts.runtime import cache_dir, run_command
from run.folder import read_record
from run.record import Events, batch_of
from tools.dataset.facts import Facts, read_facts
from tools.dataset.page import dataset_page


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    path: Annotated[str, tyro.conf.Positional]
    """A dataset folder, here or at a URL, or a run's folder, whose text, seed, packing and sizes are then used."""
    out: FilePath = ""
    """The page with a dataset's facts. Default: dataset.html in the folder, or here for a dataset at a URL."""
    step: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Show the batch of this step (the first is 0) instead of the page. For a run: the step's actual batch."""
    rows: Positive[int] = 4
    """Rows of the batch to show."""
    packing: Packing = "stream"
    """Packing of rows from a dataset folder."""
    sequence_length: Annotated[int, Meta(ge=2)] = 2048
    """Tokens of a row of a dataset folder."""
    tokens_per_step: Positive[int] = 524_288
    """Tokens of a step on a dataset folder."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Seed of the order of a dataset folder's rows."""
    tokenizer: str = ""
    """The tokenizer of a folder of .bin shards without a dataset.json."""


def describe(facts: Facts, place: str) -> str:
    """Return the facts of the dataset at `place` as text."""
    lines = [f"{place}  (fingerprint {facts.dataset.fingerprint})"]
    for name, part in (("train", facts.train), ("val", facts.val)):
        tokens, text = int(part.tokens.sum()), int(part.bytes.sum())
        lines.append(
            f"{name:8}  {len(part.tokens):,} documents, {tokens:,} tokens, {text:,} bytes, {text / tokens:.3f} a "
            f"token; tokens a document: median {np.median(part.tokens):,.0f}, "
            f"90% under {np.quantile(part.tokens, 0.9):,.0f}, longest {part.tokens.max():,}"
        )
    lines.append(
        f"repeated  {facts.repeats.sum():,} training documents repeat an earlier one; {facts.leaked.sum():,} held-out "
        "documents are trained on, too"
    )
    lines.append(f"held out  {facts.dataset.held_out}")
    if facts.dataset.conversations:
        learned, tokens = int(facts.train.learned.sum()), int(facts.train.tokens.sum())
        longer = np.count_nonzero(facts.train.tokens > len(facts.packed["whole"].seen))
        lines.append(
            f"learned   {learned:,} of {tokens:,} training tokens are an assistant's ({learned / tokens:.1%}); "
            f"{longer:,} training conversations are longer than a row"
        )
    for packing, packed in facts.packed.items():
        lines.append(
            f"{packing:8}  {packed.rows:,} rows of {len(packed.seen)} tokens: {packed.padding:.3%} padding, "
            f"{packed.cut:.1%} of the documents that fit a row are cut; a target sees {packed.mean_seen:,.0f} tokens "
            "of its own document"
        )
    return "\n".join(lines)


def describe_row(row: Row, tokenizer: TextTokenizer) -> str:
    """Return a row's documents, one per line: positions, targets that count, and the text's beginning and end."""
    starts = np.union1d(0, np.flatnonzero(row["inputs"] == tokenizer.bos))
    filled = np.flatnonzero((row["weights"] > 0) | (row["inputs"] != tokenizer.bos))
    padding = len(row["weights"]) - filled.max(initial=-1) - 1
    lines = []
    for start, stop in zip(starts, [*starts[1:], len(row["inputs"])]):
        if start < len(row["inputs"]) - padding:
            text = _text(row, slice(start, stop), tokenizer)
            shown = repr(text) if len(text) <= 100 else f"{text[:60]!r} ... {text[-40:]!r}"
            count = np.count_nonzero(row["weights"][start:stop])
            begins = "" if row["inputs"][start] == tokenizer.bos else "continues: "
            lines.append(f"  {start:6}..{stop - 1:<6} {count:6} targets  {begins}{shown}")
    return "\n".join([*lines, *([f"  {padding} positions of padding"] if padding else [])])


def _text(row: Row, of: slice, tokenizer: TextTokenizer) -> str:
    """Return a document's text; in a conversation, marks surround the tokens that count."""
    if tokenizer.special_tokens.get("<|assistant_start|>") not in row["inputs"][of]:
        return tokenizer.decode(row["inputs"][of].tolist())
    bounds = np.flatnonzero(np.diff(row["weights"][of])) + 1
    texts = [tokenizer.decode(piece.tolist()) for piece in np.split(row["targets"][of], bounds)]
    counts = [piece[0] > 0 for piece in np.split(row["weights"][of], bounds)]
    return "".join(f"«{text}»" if counted else text for text, counted in zip(texts, counts))


def _config(arguments: Arguments) -> tuple[Config, bool]:
    """Return the run's config, or one for a dataset folder, and whether it is a run's."""
    record = Path(arguments.path) / "config.json"
    if record.exists():
        return read_record(record)[1], True
    if "://" not in arguments.path and not Path(arguments.path).is_dir():
        raise UserError(f"{arguments.path} is not a folder: give a dataset's, or a run's")
    batch = BatchConfig(arguments.sequence_length, arguments.tokens_per_step)
    source = DataConfig(arguments.path, arguments.tokenizer, packing=arguments.packing)
    return Config(name="inspect", seed=arguments.seed, data=source, batch=batch), False


def show_facts(config: Config, is_run: bool, out: Path, cache: Path) -> None:
    """Print the facts of each dataset, and write the page."""
    (names, stages), length = read_source(config.data.source), config.batch.sequence_length
    options = replace(config.data, packing="best_fit")  # needs the beginnings of documents
    facts, places = [], []
    for name in names:
        facts.append(read_facts(open_dataset(name, options, config.model.vocab_size, cache), length))
        places.append(name if "://" in name else str(facts[-1].dataset.folder))
        print(describe(facts[-1], places[-1]))
    mixture, tokens = Mixture(stages, length) if is_run else None, config.steps * config.batch.tokens_per_step
    try:
        write_whole(out, dataset_page(shortest(places), facts, length, mixture, tokens))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}); give --out=PATH") from error
    print(f"{out}: the same, with pictures")


def show_step(config: Config, path: str, step: int, most: int, cache: Path) -> None:
    """Print the rows of a step's batch."""
    length = config.batch.sequence_length
    position, tokens = batch_of(Events(path).read(), step, config.batch.tokens_per_step)
    first, size = position // length, tokens // length
    first_of = open_dataset(read_source(config.data.source)[0][0], config.data, config.model.vocab_size, cache)
    vocab_size = max(config.model.vocab_size, first_of.tokenizer.vocab_size)  # a dataset folder has its own
    text = open_text(config.data, vocab_size, length, size, cache)
    sequence = RowSequence(text.train, text.mixture, config.seed)
    shown = min(most, size)
    print(f"step {step}: {size} rows of {length} tokens, of which {shown} follow")
    for i in range(shown):
        part, number = sequence[first + i]
        row = text.train[part][number]
        print(f"row {i} of the step, row {number:,} of {text.names[part]}:\n{describe_row(row, text.tokenizer)}")


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if arguments.tokens_per_step < arguments.sequence_length:
        row = f"a step has at least one row, of --sequence_length={arguments.sequence_length} tokens"
        raise UserError(f"--tokens_per_step={arguments.tokens_per_step} cannot work: {row}")
    config, is_run = _config(arguments)
    if arguments.step is None:
        home = "" if "://" in arguments.path else arguments.path
        out = Path(arguments.out or Path(home, "dataset.html")).expanduser()
        show_facts(config, is_run, out, cache_dir())
    else:
        show_step(config, arguments.path, arguments.step, arguments.rows, cache_dir())
    return 0


if __name__ == "__main__":
    run_command(main)
