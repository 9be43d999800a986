"""A dataset folder, which data.prepare wrote: opening it, and its rows."""

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from data.packing import Plan, PlannedRows, Rows, StreamRows, join_plans, load_plan, most_tokens, plan_rows, save_plan
from data.shards import Shard, TokenStream, from_disk
from data.tokenizer import TextTokenizer, load_tokenizer
from options.schema import DataConfig
from system.errors import UserError
from system.files import is_there, read_if_there

PLANNED = 2**22  # documents of one plan of rows: it takes about 145 bytes for each


def load_dataset_json(folder: Path) -> Any:
    """Return the content of the folder's dataset.json. Raise UserError if it cannot be read."""
    path = folder / "dataset.json"
    try:
        return json.loads(from_disk(path, path.read_bytes))
    except (ValueError, RecursionError) as error:
        raise damaged(folder) from error


def damaged(folder: Path) -> UserError:
    """Return the error about a dataset.json that is not what data.prepare writes."""
    return UserError(
        f"{folder}/dataset.json is damaged, or of an earlier version; delete the folder {folder}, and prepare it again"
    )


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
            content = from_disk(index, partial(read_if_there, index))
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
            # Plans of earlier versions, named `whole-drop`, lack conversations of exactly this many tokens.
            packing += f"-drop-above-{most_tokens(length)}" if config.too_long == "drop" else "-cut"
        homes = [home / "plans" / f"{part}-{packing}-{length}-{self.fingerprint}" for home in (self.folder, cache)]
        for home in homes:
            with suppress(OSError):  # it cannot be written there, or only another user may read it
                if not home.exists():
                    save_plan(join_plans(self._plans(part, config, length)), home)
                return packed(load_plan(home))
        print(f"{homes[0]} and {homes[1]} cannot be written: each start makes this plan again", file=sys.stderr)
        return packed(Plan(*map(np.concatenate, zip(*join_plans(self._plans(part, config, length))))))


def open_dataset(source: str, config: DataConfig, vocab_size: int, cache: Path, no_new_tokenizer: str = "") -> Dataset:
    """Return the dataset in the folder `source`. Raw text is prepared once, in `cache`. Raise UserError if anything in
    the dataset is invalid."""
    folder = Path(os.path.expanduser(source))
    if "://" in source and not os.path.exists(folder):
        raise UserError(
            f"--data.source={source}: rows are read from folders: mount the bucket (gcsfuse), or copy the dataset to "
            "each host (gcloud storage cp --recursive)"
        )
    if from_disk(folder, lambda: is_there(folder / "dataset.json")):
        dataset = _prepared(folder)
        if config.tokenizer:
            _require_tokenizer(dataset, config.tokenizer)
        return dataset
    if source and os.path.isdir(folder) and any(folder.glob("*.bin")):
        raise UserError(f"{folder} has shards without a dataset.json; copy it there again, or prepare the text")
    if source.startswith("hf:"):
        raise UserError(
            f"--data.source={source} is neither a dataset nor text on this machine; prepare it, and train on the "
            f"result: python -m data.prepare --source={source} --out=DIR"
        )
    return _prepared(_prepare_raw(source, config, vocab_size, cache, no_new_tokenizer))


def _prepare_raw(*arguments: Any) -> Path:
    """Return the dataset folder that data/prepare/raw.py makes from raw text. Raise its exceptions."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # -P: a user's own folder `data` is not imported.
    command = [sys.executable, "-P", "-m", "data.prepare.raw", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # If this command is interrupted, `run` kills the process, and its workers end by themselves.
    ended = subprocess.run(command, input=pickle.dumps(arguments), stdout=subprocess.PIPE, env=environment)
    if ended.returncode:
        raise RuntimeError(f"the preparation of {arguments[0]} ended with code {ended.returncode}")
    result = pickle.loads(ended.stdout)
    if isinstance(result, Exception):
        raise result
    return result


def _require_tokenizer(dataset: Dataset, name: str) -> None:
    """Raise UserError if `name`, of `--data.tokenizer` or of the run in `--init_from`, is not the dataset's
    tokenizer."""
    with suppress(UserError):  # it has another format, as tiktoken:gpt2
        if load_tokenizer(name).is_same_as(dataset.tokenizer):
            return
    raise UserError(
        f"{dataset.folder} was made with another tokenizer than {name}: prepare it again with --tokenizer={name} "
        f"(if you gave --data.tokenizer: leave that out, or give {dataset.folder}/tokenizer)"
    )


def _prepared(folder: Path) -> Dataset:
    """Return the dataset in the folder. Raise UserError if it is incomplete or damaged."""
    facts = load_dataset_json(folder)
    try:
        if not (facts["shards"] and facts["complete"]):
            raise UserError(f"{folder} is not complete; continue its preparation")
        tokenizer_sha256 = facts["tokenizer"]["sha256"]
        conversations = facts["made_from"].get("conversations", False)
        below = f"a hash below {facts['val_threshold']:.4g} of a document's text"
        held_out = below if facts["held_out_by"] == "text" else "files of their own"
        entries = {part: [shard[part] for shard in facts["shards"] if part in shard] for part in ("train", "val")}
        recorded = {part: [(folder / one["file"], one["sha256"]) for one in entries[part]] for part in entries}
        val_documents = sum(one["documents"] for one in entries["val"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(folder) from error
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.sha256 != tokenizer_sha256:
        raise UserError(f"{folder}/tokenizer is not the dataset's: its SHA-256 differs")
    with ThreadPoolExecutor() as threads:
        shards = {part: list(threads.map(_recorded_shard, recorded[part])) for part in recorded}
    identity = tokenizer.sha256, shards.keys(), [shard.blocks.sha256 for part in shards for shard in shards[part]]
    fingerprint = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return Dataset(folder, shards, tokenizer, fingerprint, held_out, val_documents, conversations)


def _recorded_shard(recorded: tuple[Path, str]) -> Shard:
    """Return the shard of a path and a SHA-256. Raise UserError if the file has another."""
    path, sha256 = recorded
    shard = Shard(path)
    if shard.blocks.sha256 != sha256:
        raise UserError(f"{path} is damaged: its SHA-256 differs from dataset.json's; delete it and prepare again")
    return shard
