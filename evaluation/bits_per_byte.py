"""Bits per byte: of a run's held-out rows, and of documents from the lines of evaluation/documents.py; their standard
errors, what they depend on, and how two networks compare on the same text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from configs.files import cache_dir
from configs.progress import progress
from configs.schema import UserError
from data.dataset import open_text
from data.loader import held_out_batches
from evaluation.documents import Source
from evaluation.network import Network
from training.mesh import batch_devices, batch_sharding
from training.step import Batch, EvalStep, make_eval_step

Lines = Sequence[Mapping[str, Any]]


def ratio(bits: Sequence[float], sizes: Sequence[float | int]) -> tuple[float, float | None]:
    """Return the sum of bits over the sum of bytes, and its standard error over documents, as of a ratio of two sums
    (Cochran, Sampling Techniques, 1977, 6.3): None for a single document."""
    numerators, denominators = np.array(bits, np.float64), np.array(sizes, np.float64)
    count, value = len(bits), float(numerators.sum() / denominators.sum())
    if count < 2:
        return value, None
    squares = np.sum((numerators - value * denominators) ** 2)
    return value, float(math.sqrt(count / (count - 1) * squares) / denominators.sum())


def figures(sources: Sequence[Source], lines: Lines) -> dict[str, Any]:
    """Return `bits_per_byte` of all sources by their shares, of each source, by size of the documents in bytes, and by
    how many tokens come before one in its row. The last is of all documents' first rows, and of those of documents that
    fill it alone, so that each position is of the same documents."""
    of_sources = {source.name: _sums([line for line in lines if line["source"] == source.name]) for source in sources}
    sizes = sorted({line["bytes"].bit_length() for line in lines})
    return {
        **_by_share(sources, [(of["bits_per_byte"], of["stderr"]) for of in of_sources.values()]),
        "documents": len(lines),
        "sources": {source.name: of_sources[source.name] | {"share": source.share} for source in sources},
        "by_bytes": [
            {"from": 1 << size - 1} | _sums([line for line in lines if line["bytes"].bit_length() == size])
            for size in sizes
        ],
        "by_position": _by_position(lines),
        "by_position_of_full_rows": _by_position([line for line in lines if line["full"]]),
    }


def _sums(lines: Lines) -> dict[str, Any]:
    value, error = ratio([line["bits"] for line in lines], [line["bytes"] for line in lines])
    counts = {name: sum(line[name] for line in lines) for name in ("bytes", "tokens")}
    return {"bits_per_byte": value, "stderr": error, "documents": len(lines), **counts}


def _by_position(lines: Lines) -> list[dict[str, Any]]:
    found = []
    for octave in range(max((len(line["bits_by_octave"]) for line in lines), default=0)):
        there = [line for line in lines if len(line["bits_by_octave"]) > octave and line["bytes_by_octave"][octave]]
        if there:
            names = ("bits_by_octave", "bytes_by_octave")
            value, error = ratio(*([line[name][octave] for line in there] for name in names))
            first = (1 << octave) >> 1
            found.append({"from": first, "bits_per_byte": value, "stderr": error, "documents": len(there)})
    return found


def _by_share(sources: Sequence[Source], values: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Return the sources' figures together. No standard error where one of them has none."""
    errors = [error for _, error in values]
    known = [source.share * error for source, error in zip(sources, errors) if error is not None]
    return {
        "bits_per_byte": sum(source.share * value for source, (value, _) in zip(sources, values)),
        "stderr": math.hypot(*known) if len(known) == len(errors) else None,
    }


def compared(sources: Sequence[Source], ours: Lines, theirs: Lines, same: bool = False) -> dict[str, Any]:
    """Return the `difference` in bits per byte, ours less theirs, paired by document: what makes a document hard for
    both is no part of its standard error. `interval`: 95%, by Student's t; `noise`: it holds 0, or both are the `same`
    network, which differs by rounding alone."""
    from scipy.stats import t  # half a second to import

    bits = [{(line["source"], line["document"]): line["bits"] for line in lines} for lines in (ours, theirs)]
    values = []
    for source in sources:
        own = [line for line in ours if line["source"] == source.name]
        keys = [(source.name, line["document"]) for line in own]
        values.append(ratio([bits[0][key] - bits[1][key] for key in keys], [line["bytes"] for line in own]))
    all_sources = _by_share(sources, values)
    difference, error = all_sources["bits_per_byte"], all_sources["stderr"]
    result = {"difference": difference, "stderr": error, "interval": None, "noise": None}
    if error is not None:
        reach = float(t.ppf(0.975, min(len(source.documents) for source in sources) - 1)) * error
        interval = [difference - reach, difference + reach]
        result |= {"interval": interval, "noise": same or interval[0] <= 0 <= interval[1]}
    by_source = {source.name: {"difference": value, "stderr": error} for source, (value, error) in zip(sources, values)}
    return {"same_parameters": same, **result, "sources": by_source}


def evaluate(
    eval_step: EvalStep,
    params: dict,
    batches: list[Batch],
    text_bytes: Int[np.ndarray, "micro_batches"],
    watched: Callable[[list], Iterable] = iter,
) -> dict[str, float | None]:
    """Return `val_loss` in nats a token, and `val_bpb` in bits a byte with its standard error `val_bpb_stderr`.

    They are over every target that stands for text (the BOS does not, as in nanochat). The two means are the same
    whatever the batches' shape and the mesh. The error is over micro-batches, each a stretch of the held-out text: None
    for a single one. `text_bytes` has each micro-batch's. `watched` shows how far it is.
    """
    sums = [eval_step(params, batch) for batch in batches]
    losses, counts = (np.concatenate(parts) for parts in zip(*(map(np.asarray, of) for of in watched(sums))))
    some = text_bytes > 0  # a micro-batch may hold no row
    _, error = ratio((losses[some] / math.log(2)).tolist(), text_bytes[some].tolist())
    loss_sum = math.fsum(losses)
    return {
        "val_loss": loss_sum / int(counts.sum()),
        "val_bpb": loss_sum / math.log(2) / int(text_bytes.sum()),
        "val_bpb_stderr": error,
    }


def evaluate_held_out(network: Network, tokens: int | None) -> dict[str, float | None]:
    """Return `evaluate`'s figures of a run's held-out text: of `tokens`, or of its `eval.tokens`. UserError if
    the text here is another than the run's."""
    config, mesh = network.config, network.mesh
    shape = (1, config.batch.rows_per_device * batch_devices(mesh), config.batch.sequence_length)
    text = open_text(config.data, config.model.vocab_size, shape[2], 1, cache_dir())
    if text.fingerprint != network.dataset:
        raise UserError(
            f"{config.data.source} is not the text that {config.name} was trained on: its fingerprint is "
            f"{text.fingerprint}, the run's {network.dataset}; evaluate where that text is"
        )
    tokens, token_bytes = tokens or config.eval.tokens, text.tokenizer.token_bytes
    batches, text_bytes = held_out_batches(
        text.val, text.weights, tokens, token_bytes, shape, batch_sharding(mesh), text.document_bos
    )
    watched = partial(progress, desc="evaluating", unit="batches", disable=jax.process_index() > 0)
    eval_step = make_eval_step(config.model, network.dtype, mesh)
    return evaluate(eval_step, network.params, batches, text_bytes, watched)
