"""Print the contents of a dataset, or the rows of a step's batch: python -m tools.dataset DIR_OR_RUN [--step=N]."""

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from msgspec import Meta

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import BatchConfig, Config, DataConfig, Positive
from system.errors import UserError
from system.files import is_there
from system.progress import progress


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    path: Annotated[str, tyro.conf.Positional]
    """A dataset's folder; or a run's, here or at gs://, whose text, seed, packing and sizes apply."""
    step: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Show the batch of this step, counted from 1 as in metrics.jsonl. For a run: the step's actual batch."""
    rows: Positive[int] = 4
    """Rows of the batch to show."""
    sequence_length: Annotated[int, Meta(ge=2)] = 2048
    """Tokens of a row of a dataset folder."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import numpy as np

from data.dataset import open_text, read_source
from data.dataset_folder import Dataset, open_dataset
from data.order import RowSequence
from data.packing import Row, learned, most_tokens, plan_rows
from data.tokenizer import TextTokenizer
from hosts.runtime import cache_dir, run_command
from run.config_json import config_of_run
from run.folder import RunFolder, folder_to_read, reading
from run.record import place_of

AT_ONCE = 1000  # documents that are read at a time


class Documents(NamedTuple):
    """The documents of one part of a dataset, in their order: a number for each."""

    starts: np.ndarray  # its position in the stream of tokens
    tokens: np.ndarray  # its tokens, with its BOS
    bytes: np.ndarray
    hashes: np.ndarray  # 64 bits of BLAKE2 over its tokens: documents with equal hashes count as equal
    learned: np.ndarray  # its tokens that are trained on: all, or an assistant's in a conversation


def read_documents(dataset: Dataset, part: str) -> Documents:
    """Read all documents of a part."""
    stream, tokenizer, starts = dataset.stream(part), dataset.tokenizer, dataset.document_starts(part)
    ends = np.append(starts[1:], len(stream))
    sizes, learns, hashes = np.zeros_like(starts), ends - starts, np.zeros(len(starts), np.uint64)
    for first in progress(range(0, len(starts), AT_ONCE), unit="thousand documents", desc=part):
        last = min(first + AT_ONCE, len(starts))
        tokens = stream.read(int(starts[first]), int(ends[last - 1])).astype(np.uint32)  # one type for all shards
        for i, document in enumerate(np.split(tokens, starts[first + 1 : last] - starts[first]), first):
            sizes[i] = tokenizer.text_bytes(document[:-1], document[1:]).sum()
            hashes[i] = int.from_bytes(blake2b(document.tobytes(), digest_size=8).digest(), "little")
            if dataset.conversations:
                learns[i] = learned(document, tokenizer.special_tokens).sum()
    return Documents(starts, ends - starts, sizes, hashes, learns)


def pack(dataset: Dataset, documents: Documents, packing: str, length: int) -> tuple[int, float, float]:
    """Plan rows of `length` tokens for training. Return the rows, the share of positions that no document fills, and
    the share of documents that would fit a row but are cut in two."""
    stream, starts, tokens = dataset.stream("train"), documents.starts, documents.tokens
    if packing == "stream":
        rows = max(len(stream) - 1, 0) // length
        filled, cut = rows * length, starts // length != (starts + tokens - 1) // length
    else:
        plan = plan_rows(packing, starts, len(stream), length)
        rows, filled, cut = len(plan.rows) - 1, int(plan.lengths.sum()), np.zeros(len(starts), bool)
    fit = tokens <= length
    return rows, 1 - filled / max(rows * length, 1), (cut & fit).sum() / max(fit.sum(), 1)


def describe(dataset: Dataset, place: str, length: int) -> str:
    """Return the facts of the dataset at `place`: documents, repeats, and rows of `length` tokens, as text."""
    train, val = (read_documents(dataset, part) for part in ("train", "val"))
    lines = [f"{place}  (fingerprint {dataset.fingerprint})", f"held out  {dataset.held_out}"]
    for name, part in (("train", train), ("val", val)):
        tokens, text = int(part.tokens.sum()), int(part.bytes.sum())
        lengths = f"median {np.median(part.tokens):,.0f}, longest {part.tokens.max():,}"
        counts = f"{len(part.tokens):,} documents, {tokens:,} tokens, {text:,} bytes, {text / tokens:.3f} a token"
        lines.append(f"{name:8}  {counts}; tokens a document: {lengths}")
    repeats, leaked = len(train.hashes) - len(np.unique(train.hashes)), np.isin(val.hashes, train.hashes).sum()
    lines.append(f"repeated  {repeats:,} training documents repeat an earlier one; {leaked:,} held-out are trained on")
    if dataset.conversations:
        count, longer = int(train.learned.sum()), np.count_nonzero(train.tokens > most_tokens(length))
        lines.append(
            f"learned   {count:,} of {train.tokens.sum():,} training tokens are an assistant's; "
            f"{longer:,} training conversations are longer than a row"
        )
    for packing in ("whole",) if dataset.conversations else ("stream", "best_fit"):
        rows, padding, cut = pack(dataset, train, packing, length)
        facts = f"{padding:.3%} padding, {cut:.1%} of documents that fit are cut"
        lines.append(f"{packing:8}  {rows:,} rows of {length} tokens: {facts}")
    return "\n".join(lines)


def describe_row(row: Row, tokenizer: TextTokenizer) -> str:
    """Return a row's documents, one per line: positions, targets that count, and the text's beginning and end."""
    starts = np.union1d(0, np.flatnonzero(row["inputs"] == tokenizer.bos))
    filled = np.flatnonzero((row["weights"] > 0) | (row["inputs"] != tokenizer.bos)).max(initial=-1) + 1
    lines = []
    for start, stop in zip(starts, [*starts[1:], len(row["inputs"])]):
        if start < filled:
            text = document_text(row, slice(start, stop), tokenizer)
            shown = repr(text) if len(text) <= 100 else f"{text[:60]!r} ... {text[-40:]!r}"
            count = np.count_nonzero(row["weights"][start:stop])
            prefix = "" if row["inputs"][start] == tokenizer.bos else "continues: "
            lines.append(f"  {start:6}..{stop - 1:<6} {count:6} targets  {prefix}{shown}")
    padding = len(row["inputs"]) - filled
    return "\n".join(lines + ([f"  {padding} positions of padding"] if padding else []))


def document_text(row: Row, of: slice, tokenizer: TextTokenizer) -> str:
    """Return a document's text; in a conversation, marks surround the tokens that count."""
    if tokenizer.special_tokens.get("<|assistant_start|>") not in row["inputs"][of]:
        return tokenizer.decode(row["inputs"][of].tolist())
    bounds = np.flatnonzero(np.diff(row["weights"][of])) + 1
    texts = [tokenizer.decode(piece.tolist()) for piece in np.split(row["targets"][of], bounds)]
    counts = [piece[0] > 0 for piece in np.split(row["weights"][of], bounds)]
    return "".join(f"«{text}»" if counted else text for text, counted in zip(texts, counts))


def show_step(config: Config, folder: RunFolder, step: int, most: int, vocab_size: int) -> None:
    """Print at most `most` rows of a step's batch. `vocab_size`: the tokenizer's, if the config's is smaller."""
    length = config.batch.sequence_length
    place = place_of(folder.events.read(), step - 1, config.batch.tokens_per_step)
    first, size = place.tokens // length, place.tokens_per_step // length
    text = open_text(config.data, max(config.model.vocab_size, vocab_size), length, size, cache_dir())
    if place.mixture and not text.mixture.continues(place.mixture):
        raise UserError(
            f"--step={step}: {folder} took it before a change of --data.source or --batch.sequence_length, which its "
            "config.json lists; only the rows of later steps can be shown"
        )
    sequence = RowSequence(text.train, text.continued(place.mixture, place.tokens).mixture, config.seed)
    shown = min(most, size)
    print(f"step {step}: {size} rows of {length} tokens, of which {shown} follow")
    for i in range(shown):
        part, number = sequence[first + i]
        row = text.train[part][number]
        print(f"row {i} of the step, row {number:,} of {text.names[part]}:\n{describe_row(row, text.tokenizer)}")


def holds_run(folder: RunFolder) -> bool:
    """Return whether the folder is a run's. Raise UserError if it is in a bucket that cannot be read."""
    file = folder.path / "config.json"
    with reading(folder.name):
        return folder.retried(is_there, file)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    path, length = arguments.path, arguments.sequence_length
    folder = folder_to_read(path)
    if is_run := holds_run(folder):
        facts, config = config_of_run(folder)
        if not facts["dataset"]:
            raise UserError(f"{path} has no text of its own: it was converted")
    elif Path(path).is_dir():
        batch = BatchConfig(length, length * arguments.rows)
        config = Config(name="dataset", data=DataConfig(path), batch=batch)
    else:
        raise UserError(f"{path} is not a folder here: give a dataset's, or a run's")
    names, options = read_source(config.data.source)[0], replace(config.data, packing="best_fit")  # finds documents
    datasets = [open_dataset(name, options, config.model.vocab_size, cache_dir()) for name in names]
    if arguments.step is not None:
        if not is_run and datasets[0].conversations:
            config = replace(config, data=replace(config.data, packing="whole"))
        show_step(config, folder, arguments.step, arguments.rows, datasets[0].tokenizer.vocab_size)
        return 0
    for dataset in datasets:
        print(describe(dataset, str(dataset.folder), config.batch.sequence_length))
    return 0


if __name__ == "__main__":
    run_command(main)
