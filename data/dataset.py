"""Dataset folders, opened: checked, and cut into the rows that a run trains on.

They lie on this machine, where shards are mapped into memory, or at a URL, of which rows are read (data/store.py). A
folder that data.prepare made has a dataset.json. One with nothing but .bin shards, as llm.c and modded-nanogpt write
them, serves too: those with the word `val` in their names are held out, and `data.tokenizer` says what the tokens mean.
"""

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from configs.schema import DataConfig, UserError
from data.blocks import NO_INDEX, MappedShard
from data.mixture import Mixture, join_source, mean_shares, read_source, split_source
from data.packing import BestFitRows, Plan, Rows, StreamRows, join_plans, load_plan, plan_rows, save_plan
from data.prepare.corpus import HELD_OUT, find_corpus, name_words
from data.prepare.preparation import Preparation, prepare
from data.record import read_record
from data.shards import TokenStream
from data.store import BlockCache, Shard, Store, StoredShard, mirrored, readers
from data.tokenizer import TextTokenizer, load_tokenizer

NAMED = "shards of which a word of the name is `val`"
PLANNED = 2**22  # documents after which rows are planned anew: a plan takes some 145 bytes for each
FEW = 30  # held-out documents
SHOWN, BEGINNING = 8, 128  # rows, and tokens of each, that tell a person what a step saw


@dataclass(frozen=True)
class Dataset:
    """One dataset folder."""

    folder: Path
    shards: Mapping[str, Sequence[Shard]]
    """Those of `train` and of `val`, in order."""
    tokenizer: TextTokenizer
    fingerprint: str
    """Equal fingerprints mean equal tokens with equal meanings."""
    held_out: str
    """How the held-out part was chosen."""
    val_documents: int | None = None
    """Held-out documents, if the folder counts them."""

    def stream(self, part: str) -> TokenStream:
        """The tokens of `train` or `val`."""
        shards = self.shards[part]
        return TokenStream(shards, readers().map if isinstance(shards[0], StoredShard) else map)

    def document_starts(self, part: str) -> Integer[np.ndarray, "documents"]:
        """Where in the stream documents start: as the shards' indices say, or where a BOS is."""
        befores = self.stream(part).starts
        return np.unique(np.concatenate([[0], *(a + b for a, b in zip(befores, self._starts(part)))]).astype(np.int64))

    def _starts(self, part: str) -> Iterator[Integer[np.ndarray, "documents"]]:
        """Where in each shard documents start."""
        for shard in self.shards[part]:
            index, recorded = shard.path.with_suffix(".starts.npy"), shard.blocks.index_sha256
            try:
                if not index.exists():
                    starts, fits = np.flatnonzero(shard[:] == self.tokenizer.bos), True
                elif recorded != NO_INDEX:
                    content = index.read_bytes()
                    fits = hashlib.sha256(content).digest() == recorded
                    starts = np.load(io.BytesIO(content))
                else:
                    starts = np.load(index)
                    fits = starts.ndim == 1 and bool((shard[:][starts] == self.tokenizer.bos).all())
            except UserError:  # of the shard
                raise
            except Exception:  # numpy raises several kinds, for a file that is cut off, is no array or not of places
                fits, starts = False, np.zeros(0, np.int64)
            if not fits:
                raise UserError(f"{index} is not the index of {shard.path.name}; delete it: BOS tokens are looked for")
            yield starts

    def _plans(self, part: str, packing: str, length: int) -> Iterator[tuple[int, Plan]]:
        """Plan some shards at a time, which bounds the memory: where each plan's shards begin, and the plan."""
        stream, found, begin = self.stream(part), [], 0
        for before, end, starts in zip(stream.starts, stream.starts[1:], self._starts(part)):
            found.append(before - begin + starts)
            if end > begin and (sum(map(len, found)) >= PLANNED or end == len(stream)):
                every = np.unique(np.concatenate([np.zeros(1, np.int64), *found]))
                headless = stream.read(begin, begin + 1).tolist() != [self.tokenizer.bos]
                yield begin, plan_rows(packing, every, end - begin, length, headless)
                found, begin = [], end

    def rows(self, part: str, packing: str, length: int, cache: Path) -> Rows:
        """The part's rows of `length` tokens. A plan that this needs is made once, and kept beside the shards, else in
        `cache`; where neither can be written, each start makes it again, and says so."""
        stream = self.stream(part)
        if packing == "stream":
            return StreamRows(stream, length)
        homes = [home / "plans" / f"{part}-{packing}-{length}-{self.fingerprint}" for home in (self.folder, cache)]
        for home in homes:
            with suppress(PermissionError):  # of another user, who alone may read it
                if os.path.exists(home):
                    return BestFitRows(stream, load_plan(home), self.tokenizer.bos, length)
        for home in homes:
            with suppress(OSError):  # it cannot be written there
                save_plan(join_plans(self._plans(part, packing, length)), home)
                return BestFitRows(stream, load_plan(home), self.tokenizer.bos, length)
        print(f"{homes[0]} and {homes[1]} cannot be written: each start makes this plan again", file=sys.stderr)
        plan = Plan(*map(np.concatenate, zip(*join_plans(self._plans(part, packing, length)))))
        return BestFitRows(stream, plan, self.tokenizer.bos, length)


@dataclass(frozen=True)
class Text:
    """What a run trains on: the rows of one dataset, or of a mixture."""

    names: list[str]
    """Of the datasets, as `config.source` names them."""
    train: list[Rows]
    val: list[Rows]
    mixture: Mixture
    """Which dataset each row to train on is of."""
    weights: list[float]
    """Each dataset's share of the held-out rows: the mean of its shares in all stages. They sum to 1."""
    tokenizer: TextTokenizer
    document_bos: int | None
    """Where documents are to be told apart (`mask_documents`), what begins them."""
    fingerprint: str
    val_documents: int | None
    """Held-out documents, if every dataset counts them."""

    def validation(self, tokens: int, length: int) -> str:
        """Return how much held-out text an evaluation of so many tokens takes."""
        found = [len(part) * length for part in self.val]
        taken = sum(min(have, round(tokens * weight)) for have, weight in zip(found, self.weights))
        said = f"validation: {taken:,} of {sum(found):,} held-out tokens"
        if taken < tokens - length * len(found):
            said += f": fewer than --eval.tokens={tokens:,}"
        if self.val_documents is not None and self.val_documents < FEW:
            said += f", of {self.val_documents} document(s): too few for small differences of bits per byte"
        return said

    def seen(self, rows: list[tuple[int, int]]) -> dict[str, list]:
        """A step's rows (dataset, row of it), and how the first of them begin, for a person to read."""
        inputs = [self.train[part][row]["inputs"][:BEGINNING] for part, row in rows[:SHOWN]]
        return {"rows": rows, "texts": [self.tokenizer.decode(ids.tolist()) for ids in inputs]}

    def epochs(self, rows: int) -> dict[str, float]:
        """How often the first `rows` rows of a run go through each dataset, by the datasets' shortest names."""
        shown = shortest(self.names)
        return {name: count / len(part) for name, part, count in zip(shown, self.train, self.mixture.counts(rows))}

    def outlook(self, rows: int, length: int, max_epochs: float) -> str:
        """What a run of so many rows takes of each dataset, and which of them run out. UserError where one is gone
        through more than `max_epochs` times (0: as often as it takes)."""
        parts, never = [], [s.begins for s in self.mixture.stages if s.begins >= rows * length]
        for i, (name, taken) in enumerate(self.epochs(rows).items()):
            size, out = len(self.train[i]), ""
            if taken > 1:
                again = self.mixture.row_after(i, size + 1, rows) - 1
                out = f", whose rows come again after {again * length:,} tokens"
            parts.append(f"{name} {taken:.3g} time{'s' * (taken != 1)}{out}")
            if max_epochs and taken > max_epochs:
                end = self.mixture.row_after(i, int(max_epochs * size) + 1, rows) - 1
                raise UserError(
                    f"--data.max_epochs={max_epochs:g}, but the run goes through {self.names[i]} {taken:.3g} times: "
                    f"its {size * length:,} tokens run out after {end * length:,} of the run's {rows * length:,} "
                    "tokens; give more of it, a smaller share, or fewer steps"
                )
        if never:
            parts.append(f"and ends before the stage from={never[0]:,}")
        return "the run goes through " + "; ".join(parts)


def shortest(names: list[str]) -> list[str]:
    """Names by which to tell these paths apart: their last parts, where these differ."""
    last = [name.rstrip("/").rpartition("/")[2] or name for name in names]
    return last if len(set(last)) == len(last) else names


def open_text(
    config: DataConfig, vocab_size: int, length: int, rows_per_step: int, cache: Path, no_training: str = ""
) -> Text:
    """Return the rows of `config.source`, `length` tokens each. Raise UserError if they are not fit for the run, and
    with the message `no_training`, if there is one, before a tokenizer is trained."""
    names, stages = read_source(config.source)
    datasets = [open_dataset(name, config, vocab_size, cache, no_training) for name in names]
    tokenizer = datasets[0].tokenizer
    for dataset in datasets:
        if dataset.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"--data.source: {dataset.folder} was made with another tokenizer than {datasets[0].folder}; make it "
                f"again with --tokenizer={datasets[0].folder}/tokenizer"
            )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"--model.vocab_size={vocab_size} is too small for the tokenizer of {config.source}, which has "
            f"{tokenizer.vocab_size} tokens; use --model.vocab_size={tokenizer.vocab_size} or more"
        )
    train, val = ([d.rows(part, config.packing, length, cache) for d in datasets] for part in ("train", "val"))
    for name, shares, rows, held_out in zip(names, zip(*(stage.shares for stage in stages)), train, val):
        needed = max(round(max(shares) * rows_per_step), 1)
        if len(rows) < needed or not len(held_out):
            raise UserError(
                f"--data.source={name} gives {len(rows)} rows of {length} tokens to train on and {len(held_out)} "
                f"held out; a step takes {needed} of it, and 1 at least must be held out: give more text, or a smaller "
                "--batch.tokens_per_step or --batch.sequence_length"
            )
    if len({dataset.held_out for dataset in datasets}) > 1:
        chosen = "; ".join(f"{name}: {dataset.held_out}" for name, dataset in zip(names, datasets))
        print(f"a text may be held out of one dataset and trained on in another: {chosen}", file=sys.stderr)
    prints = [dataset.fingerprint for dataset in datasets]
    mixed = [list(stages[0].shares), *map(tuple, stages[1:])]
    fingerprint = prints[0] if len(prints) == 1 else _digest(*mixed, prints)
    document_bos = tokenizer.bos if config.mask_documents else None
    counts = [dataset.val_documents for dataset in datasets]
    documents = None if None in counts else sum(filter(None, counts))
    mixture, weights = Mixture(stages, length), mean_shares(stages)
    return Text(names, train, val, mixture, weights, tokenizer, document_bos, fingerprint, documents)


def absolute(config: DataConfig) -> DataConfig:
    """The same text and tokenizer, by paths that lead there from any working folder: what a run's record keeps."""

    def place(name: str) -> str:
        anywhere = name in ("", "stdlib") or name.startswith(("hf:", "tiktoken:")) or "://" in name
        return name if anywhere else os.path.abspath(os.path.expanduser(name))

    stages = split_source(config.source)
    source = join_source([(begins, [(share, place(name)) for share, name in found]) for begins, found in stages])
    return replace(config, source=source, tokenizer=place(config.tokenizer))


def open_dataset(source: str, config: DataConfig, vocab_size: int, cache: Path, no_training: str = "") -> Dataset:
    """The dataset in the folder `source`, on this machine or at a URL; of raw text, the one that is made of it, once,
    in `cache`. UserError where anything in it is not what it should be."""
    folder = Path(os.path.expanduser(source))
    if "://" in source and not os.path.exists(folder):
        return _stored(source, config, cache)
    if os.path.exists(folder / "dataset.json"):
        return _prepared(folder, config, partial(MappedShard, remembered=cache / "examined"))
    if source and os.path.isdir(folder) and any(folder.glob("*.bin")):
        names = [path.name for path in folder.glob("*.bin")]
        return _made_by_others(folder, names, config, partial(MappedShard, remembered=cache / "examined"))
    if source.startswith("hf:"):
        raise _not_a_dataset(source)
    settings = Preparation(
        source=source,
        tokenizer=config.tokenizer,
        vocab_size=vocab_size,
        val_fraction=config.val_fraction,
        on_error="skip",  # and say how many
    )
    tokenizer = config.tokenizer and load_tokenizer(config.tokenizer).sha256
    made = cache / "datasets" / _digest(settings, find_corpus(source).version, tokenizer)
    if no_training and not tokenizer and not (made / "dataset.json").exists():
        raise UserError(no_training)
    prepare(settings, made)
    return _prepared(made, config, partial(MappedShard, remembered=cache / "examined"))


def _not_a_dataset(source: str) -> UserError:
    return UserError(
        f"--data.source={source} is no dataset, and not text on this machine; prepare it, and train on the folder that "
        f"this makes: python -m data.prepare --source={source} --out=DIR"
    )


def _stored(source: str, config: DataConfig, cache: Path) -> Dataset:
    """The dataset at a URL: what is small is copied, and the shards if `config.copy` says so."""
    store = Store(source)
    shards = [name for name in store.names if re.fullmatch(r"[^/]+\.bin", name)]
    if "dataset.json" not in store.names and not shards:
        raise _not_a_dataset(source)
    indices = r"|[\w-][\w.-]*\.starts\.npy" if config.packing != "stream" else ""
    small = re.compile(r"dataset\.json|tokenizer/[\w-][\w.-]*|[\w-][\w.-]*\.blocks" + indices)
    folder = mirrored(store, cache, lambda name: small.fullmatch(name) is not None)
    if config.copy == "all":
        store.copy(shards, folder)
        opened: Callable[[Path], Shard] = partial(MappedShard, remembered=cache / "examined")
    else:
        kept = BlockCache(cache / "blocks", config.cache_gb)
        opened = lambda path: StoredShard(store, path, kept, cache / "examined")
    if "dataset.json" in store.names:
        return _prepared(folder, config, opened)
    return _made_by_others(folder, shards, config, opened)


def _prepared(folder: Path, config: DataConfig, opened: Callable[[Path], Shard]) -> Dataset:
    facts = read_record(folder)
    whole = len(facts["shards"])
    if whole < max(config.shards, 1) or not (facts["complete"] or config.shards):
        raise UserError(
            f"{folder} is not complete: {whole} shard(s) are whole so far; go on with its preparation, or train on "
            f"the first of them: --data.shards={whole or 1}"
        )
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.sha256 != facts["tokenizer"]["sha256"]:
        raise UserError(f"{folder}/tokenizer is not what the dataset was made with: its SHA-256 differs")
    if config.tokenizer and load_tokenizer(config.tokenizer).sha256 != tokenizer.sha256:
        raise UserError(f"--data.tokenizer={config.tokenizer} is not the tokenizer that {folder} was made with")
    listed = {
        part: [s[part] for s in facts["shards"][: config.shards or None] if part in s] for part in ("train", "val")
    }
    shards = {part: [folder / shard["file"] for shard in listed[part]] for part in listed}
    sha256s = {folder / shard["file"]: shard["sha256"] for part in listed for shard in listed[part]}
    below = f"a hash below {facts['val_threshold']:.4g} of a document's"
    named = f"{below} name, so that equal texts may be on both sides"
    chosen = {"text": f"{below} text", "file": "files of their own"}.get(facts.get("held_out_by", ""), named)
    documents = sum(shard["documents"] for shard in listed["val"])
    return replace(_checked(folder, shards, tokenizer, sha256s, opened, chosen), val_documents=documents)


def _made_by_others(folder: Path, names: list[str], config: DataConfig, opened: Callable[[Path], Shard]) -> Dataset:
    if not config.tokenizer and (folder / "tokenizer").exists():
        raise UserError(f"{folder} has lost its dataset.json; copy it there again, or prepare the dataset again")
    if not config.tokenizer:
        raise UserError(
            f"{folder} holds shards without a dataset.json; say what their tokens mean: --data.tokenizer=tiktoken:gpt2"
        )
    found = [folder / name for name in sorted(names)]
    val = [path for path in found if HELD_OUT & name_words(path.name)]
    train = [path for path in found if path not in val][: config.shards or None]
    if tests := [path.name for path in train if "test" in name_words(path.name)]:
        raise UserError(f"{folder}/{tests[0]}: a test split must not be trained on; move it elsewhere")
    if not train or not val:
        raise UserError(
            f"{folder} has {len(train)} shard(s) to train on and {len(val)} held out; each needs one: those that are "
            "held out have the word `val` or `validation` in their names"
        )
    return _checked(folder, {"train": train, "val": val}, load_tokenizer(config.tokenizer), {}, opened, NAMED)


def _checked(
    folder: Path,
    paths: dict[str, list[Path]],
    tokenizer: TextTokenizer,
    sha256s: dict[Path, str],
    opened: Callable[[Path], Shard],
    held_out: str,
) -> Dataset:
    with ThreadPoolExecutor() as threads:  # hashing lets other threads run
        shards = {part: list(threads.map(opened, paths[part])) for part in paths}
    every = [shard for part in shards.values() for shard in part]
    for part in shards:
        if not any(map(len, shards[part])):
            raise UserError(
                f"{folder} has no token of `{part}` in the {len(shards[part])} shard(s) that were asked for"
            )
    for shard in every:
        if sha256s and shard.blocks.sha256 != sha256s[shard.path]:
            raise UserError(
                f"{shard.path} is damaged: its SHA-256 differs from dataset.json's; delete it and prepare again"
            )
        if shard.blocks.largest >= tokenizer.vocab_size:
            raise UserError(
                f"{shard.path} holds the token {shard.blocks.largest}, but its tokenizer has {tokenizer.vocab_size} "
                "tokens: it was made with another one"
            )
    fingerprint = _digest(tokenizer.sha256, shards.keys(), [shard.blocks.sha256 for shard in every])
    before = int(fingerprint, 16)  # so that the datasets of a mixture have places of their own in the cache
    for shard in every:
        if isinstance(shard, StoredShard):
            shard.before = before
        before += len(shard.blocks.entries)
    return Dataset(folder, shards, tokenizer, fingerprint, held_out)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
