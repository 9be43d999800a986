"""A dataset folder, which data.prepare wrote: its record dataset.json, opening and checking it."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np
from jaxtyping import Integer

from configs.files import with_retries
from configs.schema import DataConfig, UserError
from data.packing import Plan, PlannedRows, Rows, StreamRows, join_plans, load_plan, plan_rows, save_plan
from data.shards import Shard, TokenStream
from data.tokenizer import TextTokenizer, load_tokenizer

PLANNED = 2**22  # documents of one plan of rows: it takes about 145 bytes for each


class _Counts(TypedDict):
    documents: int
    tokens: int
    bytes: int


class _Part(_Counts):
    file: str
    sha256: str


class _Shard(TypedDict):
    """Some documents. `until` says where the source continues: (file, byte)."""

    train: NotRequired[_Part]
    val: NotRequired[_Part]
    skipped: dict[str, int]
    until: NotRequired[tuple[int, int]]


class _Tokenizer(TypedDict):
    sha256: str


class _MadeFrom(TypedDict):
    conversations: NotRequired[bool]


class _Begun(TypedDict):
    made_from: _MadeFrom
    files: int
    shards: list[_Shard]
    complete: bool


class _WithTokenizer(_Begun):
    tokenizer: _Tokenizer
    val_threshold: float
    held_out_by: str
    """`text`: by the hash of the text, below the threshold; `file`: by file."""


class _Complete(_WithTokenizer):
    train: _Counts
    val: _Counts
    skipped: dict[str, int]


def read_record(folder: Path) -> dict:
    """Return the folder's dataset.json. Raise UserError if it cannot be read, or is not from data.prepare."""
    path = folder / "dataset.json"
    try:
        facts = json.loads(with_retries(str(path), path.read_bytes))
        msgspec.convert(facts, _Begun)
        msgspec.convert(facts, _Complete if facts["complete"] else _WithTokenizer if facts["shards"] else _Begun)
        return facts
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "is damaged, or of an earlier version"
        raise UserError(f"{path} {why}; delete the folder {folder}, and prepare it again") from error


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the held-out fraction. So equal
    texts share a side in every dataset."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


@dataclass(frozen=True)
class Dataset:
    """One dataset folder."""

    folder: Path
    shards: Mapping[str, Sequence[Shard]]
    """The shards of `train` and of `val`, in order."""
    tokenizer: TextTokenizer
    fingerprint: str
    """Equal fingerprints mean equal tokens with equal meanings."""
    held_out: str
    """A description of how the held-out part was chosen."""
    val_documents: int
    """Number of held-out documents."""
    conversations: bool = False
    """True if documents are conversations: only an assistant's tokens are learned."""

    def stream(self, part: str) -> TokenStream:
        """Return the tokens of `train` or `val`."""
        return TokenStream(self.shards[part])

    def document_starts(self, part: str) -> Integer[np.ndarray, "documents"]:
        """Return the starts of documents in the stream."""
        befores = self.stream(part).starts
        return np.concatenate([before + starts for before, starts in zip(befores, self._starts(part))])

    def _starts(self, part: str) -> Iterator[Integer[np.ndarray, "documents"]]:
        """Yield the starts of documents in each shard."""
        for shard in self.shards[part]:
            index = shard.path.with_suffix(".starts.npy")
            content = index.read_bytes() if index.exists() else b""
            if hashlib.sha256(content).digest() != shard.blocks.index_sha256:
                raise UserError(f"{index} is missing or damaged; bring it back, or prepare the dataset again")
            yield np.load(io.BytesIO(content))

    def lengths(self, part: str) -> Integer[np.ndarray, "documents"]:
        """Return the number of tokens of each document."""
        return np.diff(self.document_starts(part), append=len(self.stream(part)))

    def _plans(self, part: str, config: DataConfig, length: int) -> Iterator[tuple[int, Plan]]:
        """Yield plans of some shards at a time, which bounds the memory: the start of the plan's shards, and the
        plan."""
        stream, starts_so_far, begin = self.stream(part), [], 0
        for before, end, starts in zip(stream.starts, stream.starts[1:], self._starts(part)):
            starts_so_far.append(before - begin + starts)
            if end > begin and (sum(map(len, starts_so_far)) >= PLANNED or end == len(stream)):
                every, drop = np.concatenate(starts_so_far), config.too_long == "drop"
                yield begin, plan_rows(config.packing, every, end - begin, length, drop)
                starts_so_far, begin = [], end

    def rows(self, part: str, config: DataConfig, length: int, cache: Path) -> Rows:
        """Return the part's rows of `length` tokens, as `config` packs them. A plan is made once, and stored next to
        the shards, or otherwise in `cache`. If neither can be written, each start makes it again and reports that.
        Raise UserError for a packing that would cut conversations in two."""
        stream, packing = self.stream(part), config.packing
        if self.conversations and packing != "whole":
            raise UserError(
                f"{self.folder} holds conversations, which packing={packing} would cut in two; give "
                "--data.packing=whole"
            )
        if packing == "stream":
            return StreamRows(stream, length)
        chat_tokens = self.tokenizer.special_tokens if self.conversations else None
        packed = lambda plan: PlannedRows(stream, plan, self.tokenizer.bos, length, chat_tokens)
        if packing == "whole":
            packing += f"-{config.too_long}"
        homes = [home / "plans" / f"{part}-{packing}-{length}-{self.fingerprint}" for home in (self.folder, cache)]
        # A plan that is there comes first. Path.exists would raise for a folder that only another user may read.
        for home in sorted(homes, key=os.path.exists, reverse=True):
            with suppress(OSError):  # it cannot be written there, or is another user's, readable only by them
                if not os.path.exists(home):
                    save_plan(join_plans(self._plans(part, config, length)), home)
                return packed(load_plan(home))
        print(f"{homes[0]} and {homes[1]} cannot be written: each start makes this plan again", file=sys.stderr)
        return packed(Plan(*map(np.concatenate, zip(*join_plans(self._plans(part, config, length))))))


def open_dataset(source: str, config: DataConfig, vocab_size: int, cache: Path, no_training: str = "") -> Dataset:
    """Return the dataset in the folder `source`. Raw text is prepared once, in `cache`. Raise UserError if anything in
    the dataset is invalid."""
    folder = Path(os.path.expanduser(source))
    if "://" in source and not os.path.exists(folder):
        raise UserError(
            f"--data.source={source}: rows are read from folders: mount the bucket (gcsfuse), or copy the dataset to "
            "each host (gcloud storage cp --recursive)"
        )
    if os.path.exists(folder / "dataset.json"):
        return _with_tokenizer(_prepared(folder), config.tokenizer)
    if source and os.path.isdir(folder) and any(folder.glob("*.bin")):
        raise UserError(f"{folder} has shards without a dataset.json; copy it there again, or prepare the text")
    if source.startswith("hf:"):
        raise _not_a_dataset(source)
    return _prepared(_prepare_raw(source, config, vocab_size, cache, no_training))


def _prepare_raw(*arguments: Any) -> Path:
    """Return the dataset folder that data/prepare/raw.py makes from raw text. Raise its exceptions."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # -P: a user's own folder `data` is not imported.
    command = [sys.executable, "-P", "-m", "data.prepare.raw", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        try:
            answer, _ = process.communicate(pickle.dumps(arguments))
        except BaseException:  # this command is interrupted
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"the preparation of {arguments[0]} ended with code {process.returncode}")
    result = pickle.loads(answer)
    if isinstance(result, Exception):
        raise result
    return result


def _not_a_dataset(source: str) -> UserError:
    return UserError(
        f"--data.source={source} is neither a dataset nor text on this machine; prepare it, and train on the "
        f"result: python -m data.prepare --source={source} --out=DIR"
    )


def _with_tokenizer(dataset: Dataset, given: str) -> Dataset:
    """Return the dataset. Raise UserError if its tokenizer is not `given`, the one of `--data.tokenizer`, if any."""
    if not given:
        return dataset
    try:
        tokenizer = load_tokenizer(given)
    except UserError as error:  # also a tokenizer of another format, as tiktoken:gpt2
        raise UserError(
            f"--data.tokenizer={error}; the dataset {dataset.folder} has its own tokenizer: leave the option out, or "
            f"give --data.tokenizer={dataset.folder}/tokenizer"
        ) from error
    if tokenizer.sha256 != dataset.tokenizer.sha256:
        raise UserError(
            f"{dataset.folder} has another tokenizer; leave --data.tokenizer out, or prepare the dataset again with "
            f"--tokenizer={given}"
        )
    return dataset


def _prepared(folder: Path) -> Dataset:
    """Return the dataset in the folder. Raise UserError if it is incomplete or damaged."""
    facts = read_record(folder)
    if not (facts["shards"] and facts["complete"]):
        raise UserError(f"{folder} is not complete; continue its preparation")
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.sha256 != facts["tokenizer"]["sha256"]:
        raise UserError(f"{folder}/tokenizer is not the dataset's: its SHA-256 differs")
    listed = {part: [shard[part] for shard in facts["shards"] if part in shard] for part in ("train", "val")}
    if empty := [part for part in listed if not listed[part]]:
        raise UserError(f"{folder} has no text of `{empty[0]}`")
    with ThreadPoolExecutor() as threads:
        opened = lambda entry: Shard(folder / entry["file"])
        shards = {part: list(threads.map(opened, listed[part])) for part in listed}
    every = [shard for part in shards for shard in shards[part]]
    for shard, entry in zip(every, listed["train"] + listed["val"]):
        if shard.blocks.sha256 != entry["sha256"]:
            raise UserError(
                f"{shard.path} is damaged: its SHA-256 differs from dataset.json's; delete it and prepare again"
            )
    identity = tokenizer.sha256, shards.keys(), [shard.blocks.sha256 for shard in every]
    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    below = f"a hash below {facts['val_threshold']:.4g} of a document's text"
    held_out = below if facts["held_out_by"] == "text" else "files of their own"
    val_documents = sum(shard["documents"] for shard in listed["val"])
    return Dataset(
        folder, shards, tokenizer, fingerprint, held_out, val_documents, facts["made_from"].get("conversations", False)
    )
