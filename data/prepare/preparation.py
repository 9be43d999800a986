"""Preparation of a dataset folder: checking, resuming, and recording it in dataset.json."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from data.prepare.chat_formats import FORMATS
from data.prepare.corpus import GREETING, Corpus
from data.prepare.encoding import Encoder
from data.prepare.listing import find_corpus, hold_out
from data.prepare.parts import Recipe, make_shards
from data.prepare.record import read_dataset_json, write_dataset_json
from data.prepare.selection import add_chat_tokens, held_out_threshold, sampled_tokenizer, text_lost
from data.prepare.source_files import SourceFile
from data.tokenizer import TextTokenizer
from data.tokenizer_formats import find_tokenizer
from options.schema import MIN_VOCAB_SIZE, DataConfig, Positive
from options.validation import check_types
from system.errors import StorageLost, UserError
from system.files import is_there, is_transient

FORMAT = 5  # increase it if the same text gives another dataset: cached ones are then made again
LOOKED_AT = 100  # documents with which a given tokenizer is tried
NAMED = 10  # reasons to leave out documents that are printed, the most frequent ones
MORE_TOKENS = 1.5  # times its own text's tokens per byte, at which a given tokenizer is called another text's


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Settings that determine a dataset."""

    source: str | tuple[str, ...]
    """`stdlib`, or `chat-stdlib`: conversations made of it. A file, a folder or a glob, or several (`--source A B`):
    .txt, .md, .py (a file is a document; a single file, and one above 1 MB, is cut into several), .jsonl (or
    compressed, as .json.gz and .json.zst) and .parquet; without any of these, .csv and .tsv.
    `hf:OWNER/NAME[@REVISION][:FOLDER or glob]`: from the hub. Files of a published split for validation are held out,
    and those of a test split are refused."""
    exclude: tuple[str, ...] = ()
    """Patterns of paths below the source, or of files' and folders' names, to leave out: `--exclude testdata '*.log'`.
    """
    tokenizer: str = ""
    """A tokenizer.json, a folder with one (another dataset's `tokenizer/`), or `tiktoken:gpt2`. Empty: train a
    byte-level BPE on the training documents."""
    vocab_size: Annotated[int, Meta(ge=MIN_VOCAB_SIZE, le=2**22)] = 32768  # the trainer aborts without memory
    """Vocabulary size of a trained tokenizer."""
    sample_bytes: Positive[int] = 1_000_000_000
    """Most text for training the tokenizer, about: the first documents of files from all over the source."""
    val_fraction: Annotated[float, Meta(gt=0, lt=1)] = DataConfig.val_fraction
    """Share of the documents to hold out, chosen by a hash of their texts, if no file is held out."""
    conversations: bool = False
    """Read conversations: .jsonl, .json, .parquet or .csv with `messages: [{"role", "content"}]`, or with the columns
    of ShareGPT, Alpaca, Dolly and others. docs/data.md describes them, and which tokens are learned."""
    text_column: str = ""
    """Column (.parquet, .csv, .tsv) or key (.jsonl) with the text. Empty: `text`, or `messages` for conversations."""
    text_extensions: str = ""
    """More extensions of text files: `.rst,.tex`."""
    on_error: Literal["stop", "skip"] = "stop"
    """Documents that are not UTF-8 or not JSON: stop and name the first, or skip and count all of them."""
    shard_tokens: Annotated[int, Meta(gt=0, le=2**30)] = 100_000_000
    """Most tokens of a shard, about. A shard's documents come from one task's files, so it may have fewer."""
    deduplicate: bool = False
    """Keep only the first of documents with the same text, and count the others."""


def cores() -> int:
    """Return the processors that this process may use: those it is bound to, within its container's quota."""
    # macOS assigns no processors to processes.
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # of a container, in version 2 of cgroups: microseconds in each period
    used, period = quota.read_text().split() if quota.exists() else ("max", "1")
    return bound if used == "max" else max(1, min(bound, int(used) // int(period)))


def prepare(settings: Preparation, out: Path, max_files: int | None = None, workers: int = 0) -> None:
    """Make the dataset in `out`, or its missing parts. Its bytes do not depend on interruptions, nor on `workers`: the
    number of processes; 0: one per core.

    `max_files`: take only this many of the source's files; more can follow. Raise UserError for text that is missing,
    damaged or too little, and if `out` contains something else; StorageLost if a disk or a store fails.
    """
    try:
        _prepare(check_types(settings), out, max_files, workers or cores())
    except OSError as error:  # errors of reading the text are UserErrors already
        lost = StorageLost if is_transient(error) else UserError
        raise lost(f"{out} cannot be written: {error}; the same command continues once it can") from error


def prepare_raw(source: str, config: DataConfig, vocab_size: int, cache: Path, no_new_tokenizer: str) -> Path:
    """Return the dataset folder in `cache` for raw text, made once for each source, its version and options. Raise
    UserError with the message `no_new_tokenizer`, if given, before a tokenizer would be trained."""
    settings = Preparation(
        source=source,
        tokenizer=config.tokenizer,
        vocab_size=vocab_size,
        val_fraction=config.val_fraction,
        on_error="skip",  # and say how many
    )
    tokenizer = config.tokenizer and find_tokenizer(config.tokenizer).sha256
    made_from = repr((FORMAT, settings, find_corpus(source, on_error="skip").version, tokenizer))
    out = cache / "datasets" / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    if no_new_tokenizer and not tokenizer and not is_there(out / "dataset.json"):
        raise UserError(no_new_tokenizer)
    prepare(settings, out)
    return out


def _prepare(settings: Preparation, out: Path, max_files: int | None, workers: int) -> None:
    # Files are listed first: another preparation may begin meanwhile, and writes its record before other files.
    is_taken = any(path.suffix != ".partial" and path.name != "lock" for path in out.glob("*"))
    if is_taken and not is_there(out / "dataset.json"):
        raise UserError(f"--out={out} is not empty and has no dataset (no dataset.json); choose another folder")
    before = read_dataset_json(out)["made_from"] if is_there(out / "dataset.json") else {}
    is_begun = str(settings.source).startswith("hf:") and before.get("source") == settings.source
    revision = before["version"].partition("/")[0] if is_begun else ""  # from the first start
    options = settings.text_column, settings.on_error, settings.text_extensions, revision, settings.conversations
    corpus = hold_out(find_corpus(settings.source, *options, settings.exclude))
    made_from = asdict(settings) | {"version": corpus.version, "conversations": corpus.conversations}
    made_from = json.loads(json.dumps(made_from))  # as in the record
    if not settings.exclude:
        del made_from["exclude"]  # as in the records of versions without it
    held_out = sum(file.held_out for file in corpus.files)
    files = corpus.files[: held_out + max_files if max_files else None]
    facts = _continued(out, made_from)
    if _is_complete(facts, files):
        return  # without a lock, for a folder that may only be read
    given = None
    if settings.tokenizer and "tokenizer" not in facts:
        given = _given_tokenizer(settings.tokenizer, corpus, files)  # an error here leaves no folder
    with _only_one(out):
        facts = _continued(out, made_from)
        if _is_complete(facts, files):
            return
        if facts["files"] > len(files):
            raise UserError(f"{out} was made from {facts['files']} files already, more than --max_files={max_files}")
        if 0 < facts["files"] < len(files) and settings.deduplicate:
            raise UserError(f"{out}: more files change every shard with --deduplicate; choose another --out")
        facts |= {"files": len(files), "complete": False}
        chosen = f", {held_out} of them held out ({corpus.files[0].name} ...)" if held_out else ""
        about = f"{len(files)} file(s){chosen}, once, in {out}{corpus.left_out}"
        print(f"preparing {corpus.source}: {about}", file=sys.stderr)
        if corpus.conversations and (name := corpus.chat_format()):
            print(f"conversations are made of the columns of {name}: {', '.join(FORMATS[name][0])}", file=sys.stderr)
        if "tokenizer" not in facts:
            write_dataset_json(out, facts | {"files": 0})  # this claims the folder
        shutil.rmtree(out / "parts", ignore_errors=True)  # of a start that was killed
        (out / "parts").mkdir(exist_ok=True)
        parts = Path(tempfile.mkdtemp(dir=out / "parts"))  # the dying processes of that start have another
        if "tokenizer" not in facts:
            threshold = 0.0 if held_out else held_out_threshold(corpus, files, settings.val_fraction)
            options = settings.vocab_size, settings.sample_bytes, threshold
            tokenizer = given or sampled_tokenizer(corpus, files, *options)
            tokenizer.save(out / "tokenizer")
            facts |= {"val_threshold": threshold, "held_out_by": "file" if held_out else "text"}
            facts["tokenizer"] = {name: getattr(tokenizer, name) for name in ("sha256", "bos", "vocab_size")}
            write_dataset_json(out, facts)
        sha256, threshold = facts["tokenizer"]["sha256"], facts["val_threshold"]
        recipe = Recipe(out, parts, sha256, threshold, settings.shard_tokens, settings.deduplicate)
        make_shards(recipe, corpus, files, facts, workers)
        _complete(corpus, out, facts)


def _given_tokenizer(name: str, corpus: Corpus, files: list[SourceFile]) -> TextTokenizer:
    """Return the tokenizer, with the tokens that conversations need. Raise UserError if it loses some of the text."""
    tokenizer = find_tokenizer(name)
    _ = tokenizer.bos  # raises if there is none
    tried = replace(corpus, on_error="skip")  # a bad document stops the preparation later, at its place
    documents = (document for file in files for document in tried.documents(file) if not document.problem)
    texts = {one.name: "\n".join(corpus.texts(one.text))[:100_000] for one in islice(documents, LOOKED_AT)}
    encoder = Encoder(tokenizer)
    encoded = {name: encoder.encode(text) for name, text in texts.items()}
    if lost := text_lost(tokenizer, texts, (ids.tolist() for ids in encoded.values())):
        raise UserError(f"--tokenizer={name} loses text, so bits per byte would be wrong: {lost}")
    if corpus.on_error == "stop":  # otherwise such documents are counted while they are encoded
        for document, text in texts.items():
            if wrong := encoder.miscounted(text, encoded[document]):
                raise UserError(f"--tokenizer={name} would make bits per byte wrong: {document}: {wrong}")
    tokens, size = sum(map(len, encoded.values())), sum(len(text.encode()) for text in texts.values())
    own, here = _tokens_per_byte(Path(name)), tokens / max(size, 1)
    if own and here > MORE_TOKENS * own:
        print(
            f"--tokenizer={name} takes {here:.3f} tokens for a byte of {corpus.source}, and {own:.3f} of its own text: "
            "one that is trained on both takes fewer (docs/data.md: two languages)",
            file=sys.stderr,
        )
    if corpus.conversations and tokenizer.missing_chat_tokens:
        lacking, tokenizer = tokenizer.vocab_size, add_chat_tokens(tokenizer)
        ids = f"ids {lacking:,} to {tokenizer.vocab_size - 1:,} are added"
        print(f"{name} lacks special tokens of conversations: {ids} to the dataset's copy", file=sys.stderr)
    return tokenizer


def _tokens_per_byte(tokenizer: Path) -> float:
    """Return the tokens for a byte of the text that a dataset's tokenizer was trained on; 0 if that is not known."""
    folder = (tokenizer if tokenizer.is_dir() else tokenizer.parent).parent
    if not is_there(folder / "dataset.json"):
        return 0.0
    facts = read_dataset_json(folder)
    made_from = facts["made_from"]
    is_own = facts["complete"] and not made_from["tokenizer"] and not made_from.get("conversations")
    return facts["train"]["tokens"] / facts["train"]["bytes"] if is_own else 0.0


def _complete(corpus: Corpus, out: Path, facts: dict) -> None:
    """Write the totals of all shards into the record."""
    for name in ("train", "val"):
        made = [shard[name] for shard in facts["shards"] if name in shard]
        facts[name] = {key: sum(one[key] for one in made) for key in ("documents", "tokens", "bytes")}
        if not made:
            raise UserError(f"{corpus.source}: no document is left for `{name}`; give more text")
    skipped = sum((Counter(shard["skipped"]) for shard in facts["shards"]), Counter())
    write_dataset_json(out, facts | {"skipped": dict(skipped), "complete": True})
    shutil.rmtree(out / "parts", ignore_errors=True)
    if skipped:
        total = facts["train"]["documents"] + facts["val"]["documents"] + skipped.total() - skipped[GREETING]
        print(f"{corpus.source}: left out, of {total:,} document(s):", file=sys.stderr)
        print("\n".join(_reasons(corpus, facts["shards"], skipped, total)), file=sys.stderr)


def _reasons(corpus: Corpus, shards: list[dict], skipped: Counter, total: int) -> Iterator[str]:
    """Yield a line for each of the most frequent reasons: its count, its share, and where it was met first."""
    files = {file.name: file for file in corpus.files}
    first: dict[str, tuple[str, int, int]] = {}
    for shard in shards:
        first = shard.get("first", {}) | first
    for reason, count in skipped.most_common(NAMED):
        place = ""
        if reason in first:
            name, start, number = first[reason]
            place = f" (first: {corpus.name_in(files[name], start, number)})"
        yield f"  {count:,} ({100 * count / total:.2g}%): {reason}{place}"
    if others := skipped.most_common()[NAMED:]:
        yield f"  {sum(count for _, count in others):,}: {len(others)} other reasons, which dataset.json counts"


def _continued(out: Path, made_from: dict) -> dict:
    """Return dataset.json, up to the first missing shard; a new record in an empty folder."""
    facts = read_dataset_json(out) if is_there(out / "dataset.json") else {}
    if "tokenizer" not in facts:  # nothing was made yet
        return {"made_from": made_from, "files": 0, "shards": [], "complete": False}
    before = facts["made_from"] | {"on_error": made_from["on_error"]}  # complete shards have no error
    facts["made_from"] = before
    # A version before this one may have had other options: their defaults are empty.
    if differ := [name for name in before | made_from if (before.get(name) or "") != (made_from.get(name) or "")]:
        changed = ", ".join(f"{name}: {before.get(name)} -> {made_from.get(name)}" for name in differ)
        raise UserError(
            f"{out} has a dataset made from something else ({changed}; `version` changes with the source's "
            "files); choose another --out, or delete that folder"
        )
    for number, shard in enumerate(facts["shards"]):
        if not all(is_there(out / shard[part]["file"]) for part in ("train", "val") if part in shard):
            return facts | {"shards": facts["shards"][:number], "complete": False}
    return facts


def _is_complete(facts: dict, files: list[SourceFile]) -> bool:
    return facts["complete"] and facts["files"] == len(files)


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Let only this process prepare `out` inside. Another process waits, and then finds it complete."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{out} is being prepared by another process: waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            print(f"{out} is on a disk without locks: only one process may prepare it", file=sys.stderr)
        yield
