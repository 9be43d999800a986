"""Bits of documents: each stands alone in rows of its own, so that its figure depends on it and the network only.

A document's tokens are cut into rows; each row starts with a BOS, and every token counts once. Rows of like length are
computed together, as evaluation/scorer.py does it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from configs.progress import progress
from configs.schema import BatchConfig, ModelConfig
from data.prepare.corpus import Document
from data.tokenizer import TextTokenizer
from evaluation.documents import Source
from evaluation.scorer import ROWS, coarse_size, on_rows
from model.gpt import GPT
from model.loss import log_sum_and_target
from training.mesh import batch_devices

AT_A_TIME = 256  # documents whose tokens are held, sorted by length, and logged

TokenLosses = Callable[..., Float[np.ndarray, "rows length"]]


class Piece(NamedTuple):
    """A row of a document."""

    document: int
    start: int
    """The document's first token in it."""
    tokens: Int[np.ndarray, "_"]


def make_token_losses(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> TokenLosses:
    """`losses(params, inputs [B, T], targets [B, T]) -> [B, T]` in nats, jitted: compiled once for rows of one shape. B
    divides over `data` and `fsdp`; every process gets all. The logits of one row a device exist at a time."""

    def losses(model: GPT, inputs: Array, targets: Array) -> Array:
        def row(of: tuple[Array, Array]) -> Array:
            x, targets = of
            log_sum, target = log_sum_and_target(model.lm_head(x), targets, config.softcap)
            return log_sum - target

        return jax.lax.map(row, (model.activations(inputs)[0], targets))

    return on_rows(losses, config, dtype, mesh, (ROWS, ROWS))


class DocumentLosses:
    """Called with parameters and sources, it gives a line for each document."""

    def __init__(self, tokenizer: TextTokenizer, config: ModelConfig, batch: BatchConfig, dtype: jnp.dtype, mesh: Mesh):
        self.tokenizer, self.mesh, self.length = tokenizer, mesh, batch.sequence_length
        self.tokens_per_device = batch.rows_per_device * batch.sequence_length
        self.token_losses = make_token_losses(config, dtype, mesh)
        self.facts = {"tokenizer": tokenizer.sha256, "dtype": dtype.name, "length": self.length}
        """What the lines depend on besides texts and parameters."""

    def __call__(
        self,
        params: dict,
        sources: Sequence[Source],
        done: Sequence[dict] = (),
        record: Callable[[list[dict]], Any] = lambda lines: None,
    ) -> list[dict[str, Any]]:
        """`done`: lines that an earlier start has left; `record` takes the others, as they are computed. Every process
        must call it."""
        lines = list(done)
        hidden = jax.process_index() > 0
        finished = {(line["source"], line["document"]) for line in done}
        for source in sources:
            left = [document for document in source.documents if (source.name, document.name) not in finished]
            size = sum(len(document.text.encode()) for document in left)
            with progress(total=size, unit="B", unit_scale=True, desc=source.name, disable=hidden) as bar:
                for first in range(0, len(left), AT_A_TIME):
                    some = self._lines(params, left[first : first + AT_A_TIME], bar.update)
                    new = [{"source": source.name, **line} for line in some]
                    record(new)
                    lines += new
        return lines

    def _lines(
        self, params: dict, documents: Sequence[Document], advance: Callable[[float | None], Any]
    ) -> Iterator[dict[str, Any]]:
        encoded = [np.array(ids, np.int32) for ids in self.tokenizer.encode([document.text for document in documents])]
        losses = self._losses(params, encoded, advance)
        for document, ids, nats in zip(documents, encoded, losses):
            bits, sizes = nats / math.log(2), self.tokenizer.token_bytes[ids]
            octaves = np.array([seen.bit_length() for seen in range(min(len(ids), self.length))], int)
            yield {
                "document": document.name,
                "bytes": len(document.text.encode()),
                "tokens": len(ids),
                "bits": float(bits.sum()),
                "full": len(ids) >= self.length,
                # Of its first row: by how many tokens stand before one, in octaves: 0, 1, 2-3, 4-7, ...
                "bits_by_octave": np.bincount(octaves, bits[: len(octaves)]).tolist(),
                "bytes_by_octave": np.bincount(octaves, sizes[: len(octaves)]).tolist(),
            }

    def _losses(
        self, params: dict, encoded: Sequence[Int[np.ndarray, "_"]], advance: Callable[[float | None], Any]
    ) -> list[Float[np.ndarray, "_"]]:
        """Compute the losses of documents' tokens, and advance by the bytes of text of each batch."""
        losses = [np.zeros(len(ids)) for ids in encoded]
        by_size = defaultdict(list)
        for document, ids in enumerate(encoded):
            for start in range(0, len(ids), self.length):
                piece = Piece(document, start, ids[start : start + self.length])
                by_size[min(coarse_size(len(piece.tokens)), self.length)].append(piece)
        for size, pieces in sorted(by_size.items()):
            width = batch_width(self.mesh, self.tokens_per_device // size, len(pieces))
            for first in range(0, len(pieces), width):
                batch = pieces[first : first + width]
                inputs, targets = np.full((2, width, size), self.tokenizer.bos, np.int32)
                for i, piece in enumerate(batch):
                    targets[i, : len(piece.tokens)] = piece.tokens
                    inputs[i, 1 : len(piece.tokens)] = piece.tokens[:-1]
                found = self.token_losses(params, inputs, targets)
                for piece, nats in zip(batch, found):
                    losses[piece.document][piece.start : piece.start + self.length] = nats[: len(piece.tokens)]
                advance(sum(int(self.tokenizer.token_bytes[piece.tokens].sum()) for piece in batch))
        return losses


def batch_width(mesh: Mesh, fit: int, count: int) -> int:
    """How many of `count` to compute together, where `fit` fit on a device: a power of two a device, no larger than it
    takes for all, so that the sizes of small groups are few, too."""
    replicas = batch_devices(mesh)
    return replicas * (1 << min(max(1, fit).bit_length() - 1, (-(-count // replicas) - 1).bit_length()))
