"""Opening and checking a dataset folder.

A folder from data.prepare has a dataset.json. A folder with only .bin shards, as from llm.c and modded-nanogpt, also
works: shards with the word `val` in their names are held out, and `data.tokenizer` gives their tokenizer.
"""

import hashlib
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from configs.schema import DataConfig, UserError
from data.packing import Plan, PlannedRows, Rows, StreamRows, join_plans, load_plan, plan_rows, save_plan
from data.record import HELD_OUT, name_words, read_record
from data.shards import NO_INDEX, Shard, TokenStream
from data.tokenizer import TextTokenizer, load_tokenizer

PLANNED = 2**22  # documents of one plan of rows: it takes about 145 bytes for each


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
    val_documents: int | None = None
    """Number of held-out documents, if the folder counts them."""
    conversations: bool = False
    """True if documents are conversations: only an assistant's tokens are learned."""

    def stream(self, part: str) -> TokenStream:
        """Return the tokens of `train` or `val`."""
        return TokenStream(self.shards[part])

    def document_starts(self, part: str) -> Integer[np.ndarray, "documents"]:
        """Return the starts of documents in the stream: from the shards' indices, or the positions of BOS tokens."""
        befores = self.stream(part).starts
        return np.unique(np.concatenate([[0], *(a + b for a, b in zip(befores, self._starts(part)))]).astype(np.int64))

    def _starts(self, part: str) -> Iterator[Integer[np.ndarray, "documents"]]:
        """Yield the starts of documents in each shard."""
        for shard in self.shards[part]:
            index = shard.path.with_suffix(".starts.npy")
            if shard.blocks.index_sha256 == NO_INDEX or not index.exists():
                yield np.flatnonzero(shard[:] == self.tokenizer.bos)
                continue
            content = index.read_bytes()
            if hashlib.sha256(content).digest() != shard.blocks.index_sha256:
                raise UserError(f"{index} is not the index of {shard.path.name}; delete it: BOS tokens are looked for")
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
                every = np.unique(np.concatenate([np.zeros(1, np.int64), *starts_so_far]))
                headless = stream.read(begin, begin + 1).tolist() != [self.tokenizer.bos]
                drop = config.too_long == "drop"
                yield begin, plan_rows(config.packing, every, end - begin, length, headless, drop)
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
    """Return the dataset in the folder `source`. Raw text is prepared once, in `cache`.
    Raise UserError if anything in the dataset is invalid."""
    folder, shards = Path(os.path.expanduser(source)), []
    opened: Callable[[Path], Shard] = partial(Shard, remembered=cache / "examined")
    if "://" in source and not os.path.exists(folder):
        raise UserError(
            f"--data.source={source}: rows are read from folders: mount the bucket (gcsfuse), or copy the dataset to "
            "each host (gcloud storage cp --recursive)"
        )
    if source and os.path.isdir(folder):
        shards = [path.name for path in folder.glob("*.bin")]
    if os.path.exists(folder / "dataset.json"):
        return _prepared(folder, config, opened)
    if shards:
        return _made_by_others(folder, shards, config, opened)
    if source.startswith("hf:"):
        raise _not_a_dataset(source)
    return _prepared(_prepare_raw(source, config, vocab_size, cache, no_training), config, opened)


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


def _prepared(folder: Path, config: DataConfig, opened: Callable[[Path], Shard]) -> Dataset:
    facts = read_record(folder)
    if not (facts["shards"] and facts["complete"]):
        raise UserError(f"{folder} is not complete; continue its preparation")
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.sha256 != facts["tokenizer"]["sha256"]:
        raise UserError(f"{folder}/tokenizer is not the dataset's: its SHA-256 differs")
    conversations = facts["made_from"].get("conversations", False)
    given = load_tokenizer(config.tokenizer) if config.tokenizer else tokenizer
    if (given.with_chat_tokens if conversations else given).sha256 != tokenizer.sha256:
        raise UserError(f"{folder} has another tokenizer; prepare it again with --tokenizer={config.tokenizer}")
    listed = {part: [s[part] for s in facts["shards"] if part in s] for part in ("train", "val")}
    shards = {part: {folder / shard["file"]: shard["sha256"] for shard in listed[part]} for part in listed}
    below = f"a hash below {facts['val_threshold']:.4g} of a document's text"
    chosen = below if facts["held_out_by"] == "text" else "files of their own"
    documents = sum(shard["documents"] for shard in listed["val"])
    return _checked(folder, shards, tokenizer, opened, chosen, documents, conversations)


def _made_by_others(folder: Path, names: list[str], config: DataConfig, opened: Callable[[Path], Shard]) -> Dataset:
    if not config.tokenizer and (folder / "tokenizer").exists():
        raise UserError(f"{folder} has lost its dataset.json; copy it there again, or prepare the dataset again")
    if not config.tokenizer:
        raise UserError(
            f"{folder} has shards without a dataset.json; name their tokenizer: --data.tokenizer=tiktoken:gpt2"
        )
    paths = [folder / name for name in sorted(names)]
    val = [path for path in paths if HELD_OUT & name_words(path.name)]
    train = [path for path in paths if path not in val]
    if tests := [path.name for path in train if "test" in name_words(path.name)]:
        raise UserError(f"{folder}/{tests[0]}: a test split must not be trained on; move it elsewhere")
    if not train or not val:
        raise UserError(
            f"{folder} has {len(train)} shard(s) to train on and {len(val)} held out; each needs one: those that are "
            "held out have the word `val` or `validation` in their names"
        )
    shards = {"train": dict.fromkeys(train, ""), "val": dict.fromkeys(val, "")}
    chosen = "shards with the word `val` in their names"
    return _checked(folder, shards, load_tokenizer(config.tokenizer), opened, chosen)


def _checked(
    folder: Path,
    paths: dict[str, dict[Path, str]],
    tokenizer: TextTokenizer,
    opened: Callable[[Path], Shard],
    held_out: str,
    val_documents: int | None = None,
    conversations: bool = False,
) -> Dataset:
    """Return the dataset of these shards. `paths` has each one's SHA-256, if recorded."""
    with ThreadPoolExecutor() as threads:  # hashing releases the interpreter
        shards = {part: list(threads.map(opened, paths[part])) for part in paths}
    every = [(shard, paths[part][shard.path]) for part in shards for shard in shards[part]]
    for part in shards:
        if not any(map(len, shards[part])):
            raise UserError(f"{folder} has no token of `{part}` in the {len(shards[part])} requested shard(s)")
    for shard, sha256 in every:
        if sha256 and shard.blocks.sha256 != sha256:
            raise UserError(
                f"{shard.path} is damaged: its SHA-256 differs from dataset.json's; delete it and prepare again"
            )
        if shard.blocks.largest >= tokenizer.vocab_size:
            raise UserError(
                f"{shard.path} contains the token {shard.blocks.largest}, but its tokenizer has {tokenizer.vocab_size} "
                "tokens: it was made with another tokenizer"
            )
    facts = tokenizer.sha256, shards.keys(), [shard.blocks.sha256 for shard, _ in every]
    fingerprint = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Dataset(folder, shards, tokenizer, fingerprint, held_out, val_documents, conversations)
