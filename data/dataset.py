"""A run's text: the rows of one dataset, or of a mixture of several."""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from data.dataset_folder import Dataset, open_dataset
from data.order import ROW_ORDER, Mixture
from data.packing import Row, Rows, most_tokens
from data.tokenizer import TextTokenizer
from options.schema import DataConfig
from system.errors import UserError

NEEDS_SHARES = "each dataset of a mixture needs its share, as in 0.7:DIR,0.3:DIR"
FEW = 30  # held-out documents
SHOWN, BEGINNING = 8, 128  # rows, and tokens of each, that show a step's text to a person


@dataclass(frozen=True)
class Text:
    """A run's text: the rows of one dataset, or of a mixture."""

    names: list[str]
    """Names of the datasets, as in `config.source`."""
    train: list[Rows]
    val: list[Rows]
    mixture: Mixture
    """The dataset of each training row of a new run."""
    tokenizer: TextTokenizer
    document_bos: int | None
    """The token that begins documents, if attention is restricted to them (`mask_documents`)."""
    fingerprint: str
    val_documents: int
    """Number of held-out documents."""
    too_long: str = ""
    """With `packing=whole`: the number of documents longer than a row, and their treatment."""
    row_order: ClassVar[int] = ROW_ORDER

    @property
    def weights(self) -> list[float]:
        """Return each dataset's share of the held-out rows. They sum to 1."""
        return [float(share) for share in self.mixture.shares.values()]

    def validation_message(self, tokens: int, length: int) -> str:
        """Return a line on the held-out text that an evaluation of `tokens` tokens takes."""
        available = [len(part) * length for part in self.val]
        taken = sum(min(have, round(tokens * weight)) for have, weight in zip(available, self.weights))
        line = f"validation: {taken:,} of {sum(available):,} held-out tokens"
        if taken < tokens - length * len(available):
            line += f": fewer than --eval.tokens={tokens:,}"
        if self.val_documents < FEW:
            line += f", of {self.val_documents} document(s): too few for small differences of bits per byte"
        return line

    def preview_batch(self, rows: list[tuple[int, int]]) -> dict[str, list]:
        """Return a step's rows (dataset, row of it), and the beginnings of the first ones as text."""
        inputs = [self.train[part][row]["inputs"][:BEGINNING] for part, row in rows[:SHOWN]]
        return {"rows": rows, "texts": [self.tokenizer.decode(ids.tolist()) for ids in inputs]}

    def prompts(self, asked: Sequence[str]) -> list[str]:
        """Return the prompts, with the beginning of a held-out document for each empty one, as far as there are any."""
        texts = [part for part in self.val if not part.chat_tokens]
        rows = (part[i * max(len(part) // FEW, 1)] for i in range(FEW) for part in texts if i < len(part))
        beginnings = filter(None, map(self._beginning, rows))
        return [prompt or next(beginnings, "") for prompt in asked]

    def _beginning(self, row: Row) -> str:
        """Return the first words of the first document that begins in a row and fills half of it, or no text."""
        inputs, bos, half = row["inputs"], self.tokenizer.bos, len(row["inputs"]) // 2
        starts = np.flatnonzero((inputs == bos) & (row["weights"] > 0))  # no BOS of a longer document's later row
        bodies = (inputs[start + 1 : start + 1 + half].tolist() for start in starts)
        body = next((ids for ids in bodies if len(ids) == half and bos not in ids), [])
        words = re.match(r"\s*(\S+\s+){0,3}\S+|", self.tokenizer.decode(body).rstrip("\ufffd"))
        return words[0][:40] if words else ""

    def continued(self, record: dict[str, Any] | None, tokens: int) -> "Text":
        """Return the text of a run after `tokens` tokens, from the record of its mixture; None: it is new."""
        return replace(self, mixture=self.mixture.continued(record, tokens)) if record else self

    def epochs(self, rows: int) -> dict[str, float]:
        """Return the epochs of each dataset in the first `rows` rows of a run, by the datasets' shortest names."""
        shown = shortest(self.names)
        return {name: count / len(part) for name, part, count in zip(shown, self.train, self.mixture.counts(rows))}

    def steps(self, epochs: float, rows: int) -> int:
        """Return the complete steps of `rows` rows in these epochs of all datasets, at least one."""
        return max(int(epochs * sum(map(len, self.train))) // rows, 1)

    def outlook_message(self, rows: int, length: int, tokens: int, mixture: dict[str, Any] | None) -> str:
        """Return a line on the tokens of a run of `rows` rows, and the epochs of each dataset, for a run that continues
        a recorded mixture after `tokens` tokens."""
        epochs = self.continued(mixture, tokens).epochs(rows)
        parts = [f"{name} {taken:.3g} time{'s' * (taken != 1)}" for name, taken in epochs.items()]
        return f"in {rows * length:,} tokens the run goes through " + "; ".join(parts)


def split_source(source: str) -> list[tuple[str, str]]:
    """Return the sources of `--data.source` with their shares, as texts: [("", "/web")] of `/web`, and
    [("0.7", "/web"), ("0.3", "/code")] of `0.7:/web,0.3:/code`."""
    parts = source.split(",")
    matched = [(match[1], match[2]) for part in parts if (match := re.fullmatch(r"(-?\d*\.?\d+):(.+)", part))]
    if 0 < len(matched) < len(parts):
        raise UserError(f"--data.source={source}: {NEEDS_SHARES}")
    return matched or [("", source)]


def join_source(parts: list[tuple[str, str]]) -> str:
    """Return the text that `split_source` splits."""
    return ",".join(f"{share}:{name}" if share else name for share, name in parts)


def read_source(source: str) -> tuple[list[str], list[Fraction]]:
    """Return the sources of `--data.source` and their shares, which sum to 1. Raise UserError for impossible ones."""
    parts = split_source(source)
    shares = {name: Fraction(share or 1) for share, name in parts}
    if min(shares.values()) <= 0:
        raise UserError(f"--data.source={source}: a share must be above 0; {NEEDS_SHARES}")
    if len(shares) < len(parts):
        raise UserError(f"--data.source={source}: a text is named twice: give it the sum of its shares")
    total = sum(shares.values())
    return list(shares), [share / total for share in shares.values()]


def shortest(names: list[str]) -> list[str]:
    """Return short distinct names for these paths: their last parts, if they differ."""
    last = [name.rstrip("/").rpartition("/")[2] or name for name in names]
    return last if len(set(last)) == len(last) else names


def open_text(
    config: DataConfig, vocab_size: int, length: int, rows_per_step: int, cache: Path, no_new_tokenizer: str = ""
) -> Text:
    """Return the rows of `config.source`, `length` tokens each. Raise UserError if they do not fit the run. Also raise
    it, with the message `no_new_tokenizer` if given, before a tokenizer would be trained."""
    names, shares = read_source(config.source)
    datasets = [open_dataset(name, config, vocab_size, cache, no_new_tokenizer) for name in names]
    tokenizer = datasets[0].tokenizer
    for dataset in datasets:
        if not dataset.tokenizer.is_same_as(tokenizer):
            raise UserError(
                f"--data.source: {dataset.folder} was made with another tokenizer than {datasets[0].folder}; make it "
                f"again with --tokenizer={datasets[0].folder}/tokenizer"
            )
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"--model.vocab_size={vocab_size} is too small for the tokenizer of {config.source}, which has "
            f"{tokenizer.vocab_size} tokens; use --model.vocab_size={tokenizer.vocab_size} or more"
        )
    train, val = ([d.rows(part, config, length, cache) for d in datasets] for part in ("train", "val"))
    too_long = _too_long(names, datasets, config, length) if config.packing == "whole" else ""
    for name, share, rows, held_out in zip(names, shares, train, val):
        needed = max(round(share * rows_per_step), 1)
        if len(rows) < needed or not len(held_out):
            advice = "a smaller --batch.tokens_per_step or --batch.sequence_length"
            if too_long:
                or_cut = ", or --data.too_long=cut" * (config.too_long == "drop")
                advice = f"a smaller --batch.tokens_per_step, a larger --batch.sequence_length{or_cut}; {too_long}"
            # An evaluation asks for one row.
            of_step = f" (--batch.tokens_per_step={rows_per_step * length})" * (rows_per_step > 1)
            raise UserError(
                f"--data.source={name} gives {len(rows)} rows of {length} tokens to train on and {len(held_out)} "
                f"held out; a step takes {needed} rows{of_step}, and 1 must "
                f"be held out: give more text, or {advice}"
            )
        for some, what in ((rows, ""), (held_out, "held-out ")):
            # Usually the first row has a learned token.
            if some.chat_tokens and not any(some[i]["weights"].any() for i in range(len(some))):
                raise UserError(
                    f"--data.source={name}: in its {len(some)} {what}rows of {length} tokens no token of an assistant "
                    f"is left to learn; give a larger --batch.sequence_length; {too_long}"
                )
    if len({dataset.held_out for dataset in datasets}) > 1:
        chosen = "; ".join(f"{name}: {dataset.held_out}" for name, dataset in zip(names, datasets))
        print(f"a text may be held out of one dataset and trained on in another: {chosen}", file=sys.stderr)
    prints = [dataset.fingerprint for dataset in datasets]
    if len({*prints}) < len(prints):
        raise UserError(f"--data.source={config.source}: a text is named twice: give it the sum of its shares")
    fingerprint = prints[0] if len(prints) == 1 else hashlib.sha256(repr((shares, prints)).encode()).hexdigest()[:16]
    mixture = Mixture(dict(zip(prints, shares)), length)
    document_bos = tokenizer.bos if config.mask_documents else None
    documents = sum(dataset.val_documents for dataset in datasets)
    return Text(names, train, val, mixture, tokenizer, document_bos, fingerprint, documents, too_long)


def _too_long(names: list[str], datasets: list[Dataset], config: DataConfig, length: int) -> str:
    """Return a line on the documents of each dataset that are longer than a row."""
    counts, every, most = [], [], most_tokens(length)
    for name, dataset in zip(shortest(names), datasets):
        train, val = dataset.lengths("train"), dataset.lengths("val")
        every += [train, val]
        longer = [f"{np.count_nonzero(sizes > most):,} of {len(sizes):,}" for sizes in (train, val)]
        counts.append(f"{name} {longer[0]} to train on and {longer[1]} held out")
    what = "cut at their row's end" if config.too_long == "cut" else "left out"
    sizes = np.concatenate(every)
    return (
        f"documents of more than {most:,} tokens are {what} (--data.too_long): {'; '.join(counts)}; half of all have "
        f"at most {int(np.median(sizes)):,} tokens, and the longest {sizes.max():,}"
    )


def absolute(config: DataConfig) -> DataConfig:
    """Return the config with absolute paths of text and tokenizer, for a run's record."""

    def absolute_path(name: str) -> str:
        anywhere = name in ("", "stdlib", "chat-stdlib") or name.startswith(("hf:", "tiktoken:")) or "://" in name
        return name if anywhere else os.path.abspath(os.path.expanduser(name))

    source = join_source([(share, absolute_path(name)) for share, name in split_source(config.source)])
    return replace(config, source=source, tokenizer=absolute_path(config.tokenizer))
