"""Questions to a network on the mesh: the losses of their answers.

Parameters stay where they lie, as in a step; questions are divided over `data` and `fsdp`. What the options of a
question begin with alike is read once, into a cache of keys and values from which each option goes on. Lengths are
rounded to a few sizes, so that few programs are compiled; the logits of scored tokens alone are computed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from configs.schema import ModelConfig
from evaluation.core import Question, common_prefix
from model.gpt import GPT
from model.loss import log_sum_and_target, softcap
from model.parallel import mark_varying, pmax_over_tensor, tensor_index
from training.state import abstract_params, split_model
from training.step import all_gather_data, on_each_device

SMALLEST = 64  # tokens: a shorter prefix is not worth a pass of its own
ROWS = PartitionSpec(("data", "fsdp"))
CHUNK = 16  # scored tokens of a row whose logits exist at a time


class Scores(NamedTuple):
    """Of each option of one or several questions."""

    loss_sums: Float[Array, "*options"]
    """Nats over the scored tokens."""
    likeliest: Bool[Array, "*options"]
    """Whether each scored token is the likeliest at its place (the first one of several), as argmax finds it."""
    margins: Float[Array, "*options"]
    """The least, of the scored tokens, by which the capped logit lies above the highest of all others."""


Score = Callable[..., Scores]


def size_up(length: int) -> int:
    """The next larger of the sizes 64, 96, 128, 192, 256, 384, ...: two in each octave."""
    power = max(SMALLEST, 1 << (length - 1).bit_length())
    return power * 3 // 4 if SMALLEST < length <= power * 3 // 4 else power


def size_down(length: int) -> int:
    """The next smaller of the sizes 64, 80, 96, 112, 128, 160, ...: four in each octave, since each token that is left
    of a prefix costs one in every option; 0 below the smallest."""
    quarter = 1 << max(length.bit_length() - 3, 0)
    return length // quarter * quarter if length >= SMALLEST else 0


def make_score(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh) -> Score:
    """`score(params, prefixes [B, P], rows [B, C, T], starts [B, C], ends [B, C], chunks) -> Scores [B, C]`, jitted:
    compiled once for arrays of one shape.

    Each of C options of a question is its prefix and then its row, of which the tokens from `starts` (at least 1) up to
    `ends` are scored, at most `chunks * CHUNK`. B divides over `data` and `fsdp`; every process gets all scores.
    """

    def score(model: GPT, prefixes: Array, rows: Array, starts: Array, ends: Array, chunks: Array) -> Scores:
        questions, choices, length = rows.shape
        shared, cache = prefixes.shape[1], None
        if shared:
            _, cache = model.activations(prefixes, model.empty_cache(questions, shared + length))
            cache = jax.tree.map(lambda kept: jnp.repeat(kept, choices, axis=0), cache)
        tokens = rows.reshape(-1, length)
        x, _ = model.activations(tokens, cache, start=shared)
        first, end = starts.reshape(-1, 1) - 1, ends.reshape(-1, 1) - 1  # what predicts them

        def chunk(i: Array, scores: Scores) -> Scores:
            places = first + i * CHUNK + jnp.arange(CHUNK)
            scored, here = places < end, jnp.minimum(places, length - 2)
            targets = jnp.take_along_axis(tokens, here + 1, axis=1)
            logits = model.lm_head(jnp.take_along_axis(x, here[..., None], axis=1))
            loss, likeliest, margin = token_scores(logits, targets, config.softcap)
            return Scores(
                scores.loss_sums + jnp.sum(jnp.where(scored, loss, 0), axis=1),
                scores.likeliest & jnp.all(likeliest | ~scored, axis=1),
                jnp.minimum(scores.margins, jnp.min(jnp.where(scored, margin, jnp.inf), axis=1)),
            )

        count = questions * choices
        start = Scores(jnp.zeros(count), jnp.ones(count, bool), jnp.full(count, jnp.inf))
        scores = jax.lax.fori_loop(0, chunks, chunk, mark_varying(start, ("data", "fsdp")))
        return jax.tree.map(lambda score: score.reshape(questions, choices), scores)

    return on_rows(score, config, dtype, mesh, (ROWS, ROWS, ROWS, ROWS, PartitionSpec()))


def on_rows(
    function: Callable, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, arrays: Sequence[PartitionSpec]
) -> Callable[..., Any]:
    """`function(model, *arrays)`, which is written for one device, as a function of float32 parameters as they lie and
    of whole arrays, jitted. `arrays` says how these are divided; every process gives the same ones, and gets all of the
    result, which is divided over rows, on its host."""
    graphdef, _ = split_model(config, dtype)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, abstract_params(config, mesh))

    def for_one_device(params: dict, *arrays: Array) -> Any:
        return function(nnx.merge(graphdef, all_gather_data(params, specs, dtype)), *arrays)

    on_mesh = on_each_device(for_one_device, mesh, (specs, *arrays), ROWS)
    compiled = jax.jit(on_mesh, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def put(array: np.ndarray, spec: PartitionSpec) -> Array:  # of which every process holds the whole
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])

    return lambda params, *given: jax.device_get(compiled(params, *map(put, given, arrays)))


def token_scores(
    logits: Float[Array, "rows length vocab_share"], targets: Int[Array, "rows length"], cap: float
) -> tuple[Float[Array, "rows length"], Bool[Array, "rows length"], Float[Array, "rows length"]]:
    """Each target's loss, whether it is the likeliest token, and by how much its capped logit lies above the others."""
    log_sum, target = log_sum_and_target(logits, targets, cap)
    share = logits.shape[-1]
    token, capped = tensor_index() * share + jnp.arange(share), softcap(logits, cap)
    highest = lambda among: pmax_over_tensor(jnp.max(jnp.where(among, capped, -jnp.inf), axis=-1))
    before, after = highest(token < targets[..., None]), highest(token > targets[..., None])
    return log_sum - target, (target > before) & (target >= after), target - jnp.maximum(before, after)


def shape_of(question: Question) -> tuple[int, int, int]:
    """`(C, P, T)` that it is computed in: options, tokens of the prefix that is read once, tokens of a row after it."""
    rows, starts = question.rows, [start for start, end in question.spans if start < end]
    shared = min([common_prefix(rows), *(start - 1 for start in starts)]) if len(rows) > 1 else 0
    prefix = size_down(shared)
    return len(rows), prefix, size_up(max(map(len, rows)) - prefix)


def score_questions(
    score: Score, params: dict, questions: Sequence[Question], mesh: Mesh, tokens_per_device: int
) -> Iterator[tuple[Question, Scores]]:
    """Each question with its scores, those of one shape together, in batches of at most `tokens_per_device` (or of one
    question a device). `score` is of `make_score`. Every process must go through all of it."""
    by_shape = defaultdict(list)
    for question in questions:
        by_shape[shape_of(question)].append(question)
    for (choices, prefix, length), alike in sorted(by_shape.items(), key=lambda group: group[0]):
        width = batch_width(mesh, tokens_per_device // (prefix + choices * length), len(alike))
        for first in range(0, len(alike), width):
            batch = alike[first : first + width]
            scores = score(params, *arrays_of(batch, width, choices, prefix, length))
            for i, question in enumerate(batch):
                yield question, Scores(*(of_all[i] for of_all in scores))


def batch_width(mesh: Mesh, fit: int, count: int) -> int:
    """How many of `count` to compute together, where `fit` fit on a device: a power of two a device, no larger than it
    takes for all, so that the sizes of small groups are few, too."""
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    return replicas * (1 << min(max(1, fit).bit_length() - 1, (-(-count // replicas) - 1).bit_length()))


def arrays_of(batch: Sequence[Question], width: int, choices: int, prefix: int, length: int) -> tuple[np.ndarray, ...]:
    """What `make_score`'s function takes besides the parameters; rows are padded with 0, and questions with rows of
    which nothing is scored."""
    prefixes = np.zeros((width, prefix), np.int32)
    rows = np.zeros((width, choices, length), np.int32)
    starts, ends = np.ones((2, width, choices), np.int32)
    for i, question in enumerate(batch):
        prefixes[i] = question.rows[0][:prefix]
        for j, (row, (start, end)) in enumerate(zip(question.rows, question.spans)):
            rows[i, j, : len(row) - prefix] = row[prefix:]
            if start < end:
                starts[i, j], ends[i, j] = start - prefix, end - prefix
    chunks = np.int32(-(-np.max(ends - starts) // CHUNK))
    return prefixes, rows, starts, ends, np.asarray(chunks)
