"""From a source of text to a folder of tokens, made once and cached.

<cache>/<fingerprint>/train.bin  val.bin  tokenizer.json  dataset.json
"""

import hashlib
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Integer
from tokenizers import Tokenizer

from configs.schema import MIN_VOCAB_SIZE, DataConfig, UserError
from data.corpus import Corpus, read_corpus
from data.shards import read_shard, write_shard
from data.tokenizer import SPLIT, encode_documents, load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Dataset:
    """Tokens of both parts, mapped into memory, the tokenizer that made them, and what dataset.json says of them."""

    train: Integer[np.ndarray, "train_tokens"]
    val: Integer[np.ndarray, "val_tokens"]
    tokenizer: Tokenizer
    facts: dict

    @property
    def fingerprint(self) -> str:
        """Names the text, the split and the tokenizer: equal fingerprints mean equal tokens."""
        return self.facts["fingerprint"]

    def save_tokenizer(self, folder: Path) -> None:
        """Writes `tokenizer.json`, so that a run's network can be used without its text."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))


def prepare(config: DataConfig, vocab_size: int, cache: Path) -> Dataset:
    """The dataset of `config`, from the folder `cache` where the same text was prepared before. UserError for text that
    is missing, or too little for the vocabulary."""
    corpus = read_corpus(config.source, config.val_fraction)
    if corpus.skipped:
        skipped = ", ".join(corpus.skipped)
        print(f"left out {len(corpus.skipped)} file(s) that are not UTF-8: {skipped}", file=sys.stderr)
    fingerprint = _fingerprint(corpus, vocab_size)
    folder = cache / fingerprint
    if not folder.exists():
        documents = len(corpus.train) + len(corpus.val)
        print(f"preparing {config.source}: {documents} documents, once (kept in {folder})", file=sys.stderr)
        _write(corpus, vocab_size, fingerprint, folder)
    facts = json.loads((folder / "dataset.json").read_text())
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return Dataset(read_shard(folder / "train.bin"), read_shard(folder / "val.bin"), tokenizer, facts)


def _fingerprint(corpus: Corpus, vocab_size: int) -> str:
    digest = hashlib.sha256(repr((1, vocab_size, SPLIT, tokenizers.__version__)).encode())
    for part in (corpus.train, corpus.val):
        for document in part:
            for text in (document.name, document.text):
                data = text.encode()
                digest.update(len(data).to_bytes(8, "big") + data)
        digest.update(b"end of part")
    return digest.hexdigest()[:16]


def _write(corpus: Corpus, vocab_size: int, fingerprint: str, folder: Path) -> None:
    tokenizer = train_tokenizer((document.text for document in corpus.train), vocab_size)
    learned = tokenizer.get_vocab_size()
    if learned < vocab_size:
        raise UserError(
            f"--model.vocab_size={vocab_size} is more than this text can fill: its tokenizer learned {learned} tokens; "
            + (
                f"use --model.vocab_size={learned} or less, or more text"
                if learned >= MIN_VOCAB_SIZE
                else "use more text"
            )
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when whole, so that a killed or a concurrent preparation leaves nothing half made.
    partial = Path(tempfile.mkdtemp(prefix=f"{fingerprint}.", dir=folder.parent))
    facts: dict = {"fingerprint": fingerprint, "vocab_size": vocab_size, "skipped_files": corpus.skipped}
    for name, documents in (("train", corpus.train), ("val", corpus.val)):
        tokens = encode_documents(tokenizer, (document.text for document in documents))
        write_shard(partial / f"{name}.bin", tokens, vocab_size)
        size = sum(len(document.text.encode()) for document in documents)
        facts[name] = {"documents": len(documents), "tokens": len(tokens), "bytes": size}
    tokenizer.save(str(partial / "tokenizer.json"))
    (partial / "dataset.json").write_text(json.dumps(facts, indent=2))
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)  # another process was first, with the same bytes
