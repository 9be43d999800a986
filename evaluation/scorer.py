"""Questions to a network on the mesh: the losses of their answers.

Parameters stay where they lie, as in a step; questions are divided over `data` and `fsdp`. What the options of a
question begin with alike is read once, into a cache of keys and values from which each option goes on. Lengths are
rounded to a few sizes, so that few programs are compiled; the logits of scored tokens alone are computed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from configs.progress import progress
from configs.schema import BatchConfig, ModelConfig
from evaluation.core import Question, common_prefix
from model.axes import BATCH_AXES
from model.gpt import GPT
from model.loss import log_sum_and_target, softcap
from model.parallel import mark_varying, pmax_over_tensor, tensor_index
from training.mesh import batch_devices, parameter_places, spec_of
from training.shares import all_gather_data, on_each_device
from training.state import split_model

MIN_SHARED = 16  # tokens
WORTH = 2048  # tokens: a program that saves no more is not worth compiling
ROWS = PartitionSpec(BATCH_AXES)


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
    """The next larger of the sizes 8, 16, ..., 128, 144, 160, ...: at least eight in each octave from 64 on."""
    step = max(8, 1 << max((length - 1).bit_length() - 4, 0))
    return -(-length // step) * step


def coarse_size(length: int) -> int:
    """The next larger of the sizes 64, 96, 128, 192, 256, 384, ...: two in each octave, where shapes are not joined."""
    power = max(64, 1 << (length - 1).bit_length())
    return power * 3 // 4 if 64 < length <= power * 3 // 4 else power


def size_down(length: int) -> int:
    """The next smaller of `size_up`'s sizes; 0 for a prefix that is not worth a pass of its own."""
    step = max(8, 1 << max(length.bit_length() - 4, 0))
    return length // step * step if length >= MIN_SHARED else 0


def chunk_of(rows: int) -> int:
    """Scored tokens whose logits a device computes at a time, of so many rows."""
    return min(256, 16 * rows)


def make_score(config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, row: int) -> Score:
    """`score(params, prefixes [B, P], rows [B, C, T], starts [B, C], ends [B, C], chunks) -> Scores [B, C]`, jitted:
    compiled once for arrays of one shape.

    Each of C options of a question is its prefix and then its row, of which the tokens from `starts` (at least 1) up to
    `ends` are scored, on a device at most `chunks` times `chunk_of` its rows. B divides over `data` and `fsdp`; every
    process gets all scores. A token sees at most `row` tokens back, as many as training's rows have.
    """

    def score(model: GPT, prefixes: Array, rows: Array, starts: Array, ends: Array, chunks: Array) -> Scores:
        questions, choices, length = rows.shape
        shared, cache = prefixes.shape[1], None
        if shared + length > row:
            for block in model.blocks:
                block.attention.window = min(block.attention.window or row, row)
        if shared:
            _, cache = model.activations(prefixes, model.empty_cache(questions, shared + length))
            cache = jax.tree.map(lambda kept: jnp.repeat(kept, choices, axis=0), cache)
        tokens, counts = rows.reshape(-1, length), (ends - starts).ravel()
        x, _ = model.activations(tokens, cache, start=shared)
        size = chunk_of(len(tokens))
        upto = jnp.cumsum(counts)  # scored tokens of the rows up to each, counted one after the other

        def chunk(i: Array, of_tokens: Scores) -> Scores:
            number = i * size + jnp.arange(size)
            row = jnp.searchsorted(upto, number, side="right")  # beyond the last one: none, and dropped below
            place = starts.ravel()[row] + number - (upto - counts)[row]
            logits = model.lm_head(x[row, place - 1])
            scores = token_scores(logits, tokens[row, place], config.softcap)
            return jax.tree.map(lambda all, new: all.at[row, place].set(new, mode="drop"), of_tokens, Scores(*scores))

        of_tokens = Scores(jnp.zeros(tokens.shape), jnp.ones(tokens.shape, bool), jnp.full(tokens.shape, jnp.inf))
        of_tokens = jax.lax.fori_loop(0, chunks, chunk, mark_varying(of_tokens, BATCH_AXES))
        sums = (jnp.sum(of_tokens[0], axis=1), jnp.all(of_tokens[1], axis=1), jnp.min(of_tokens[2], axis=1))
        return Scores(*(score.reshape(questions, choices) for score in sums))

    return on_rows(score, config, dtype, mesh, (ROWS, ROWS, ROWS, ROWS, PartitionSpec()))


class Scorer:
    """Called with parameters and questions, it gives each with its scores, those of one shape together. Every process
    must go through all of it."""

    def __init__(
        self, config: ModelConfig, batch: BatchConfig, dtype: jnp.dtype, mesh: Mesh, longest: int | None = None
    ):
        """`longest`: most tokens that the network reads, as many as a row of `batch` has unless it is given."""
        self.longest = longest or batch.sequence_length
        self.facts = {"dtype": dtype.name, "longest": self.longest, "window": batch.sequence_length}
        """What scores depend on besides parameters and questions."""
        self.tokens_per_device = batch.rows_per_device * batch.sequence_length
        self.replicas = batch_devices(mesh)
        self.score = make_score(config, dtype, mesh, batch.sequence_length)

    def __call__(self, params: dict, questions: Sequence[Question]) -> Iterator[tuple[Question, Scores]]:
        hidden = jax.process_index() > 0
        bar = progress(total=len(questions), unit="questions", desc="scoring", leave=False, disable=hidden)
        for shape, alike in by_shape(questions).items():
            fit = self.replicas * max(1, self.tokens_per_device // tokens_of(shape, 1))
            batches = -(-len(alike) // fit)
            a_device = -(-len(alike) // (self.replicas * batches))  # as many in each, so that few rows are empty
            for first in range(0, len(alike), self.replicas * a_device):
                batch = alike[first : first + self.replicas * a_device]
                arrays = arrays_of(batch, self.replicas * a_device, *shape)
                of_devices = np.sum((arrays[3] - arrays[2]).reshape(self.replicas, -1), axis=1)
                chunks = -(-np.max(of_devices) // chunk_of(a_device * shape[0]))
                scores = self.score(params, *arrays, np.asarray(chunks, np.int32))
                for i, question in enumerate(batch):
                    yield question, Scores(*(of_all[i] for of_all in scores))
                bar.update(len(batch))
        bar.close()


def on_rows(
    function: Callable, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, arrays: Sequence[PartitionSpec]
) -> Callable[..., Any]:
    """`function(model, *arrays)`, which is written for one device, as a function of float32 parameters as they lie and
    of whole arrays, jitted. `arrays` says how these are divided; every process gives the same ones, and gets all of the
    result, which is divided over rows, on its host."""
    graphdef, _ = split_model(config, dtype)
    places = parameter_places(config, mesh)

    def for_one_device(params: dict, *arrays: Array) -> Any:
        return function(nnx.merge(graphdef, all_gather_data(params, places, dtype)), *arrays)

    on_mesh = on_each_device(for_one_device, mesh, dtype, (jax.tree.map(spec_of, places), *arrays), ROWS)
    compiled = jax.jit(on_mesh, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def put(array: np.ndarray, spec: PartitionSpec) -> Array:  # of which every process holds the whole
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])

    return lambda params, *given: jax.device_get(compiled(params, *map(put, given, arrays)))


def token_scores(
    logits: Float[Array, "tokens vocab_share"], targets: Int[Array, "tokens"], cap: float
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"], Float[Array, "tokens"]]:
    """Each target's loss, whether it is the likeliest token, and by how much its capped logit lies above the others."""
    log_sum, target = log_sum_and_target(logits, targets, cap)
    token = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
    # The cap keeps the order, so the highest alone are capped.
    highest = lambda among: softcap(pmax_over_tensor(jnp.max(jnp.where(among, logits, -jnp.inf), axis=-1)), cap)
    before, after = highest(token < targets[:, None]), highest(token > targets[:, None])
    return log_sum - target, (target > before) & (target >= after), target - jnp.maximum(before, after)


Shape = tuple[int, int, int]
"""`(C, P, T)` of questions computed together: options, tokens of the prefix that is read once, of a row after it."""


def shape_of(question: Question) -> Shape:
    """The one that fits it most closely."""
    rows, starts = question.rows, [start for start, end in question.spans if start < end]
    prefix = size_down(min([common_prefix(rows), *starts]) - 1)
    return len(rows), prefix, size_up(max(map(len, rows)) - prefix)


def by_shape(questions: Sequence[Question]) -> dict[Shape, list[Question]]:
    """Questions by the shape that they are computed in. Each shape is a program, and to be few, neighbours are joined
    for as long as that costs a sixteenth more tokens in all, or `WORTH`."""
    fitting, found = defaultdict(list), defaultdict(list)
    for question in questions:
        fitting[shape_of(question)].append(question)
    for _, of_choices in groupby(sorted(fitting), lambda shape: shape[0]):
        groups = [(shape, fitting[shape]) for shape in of_choices]
        spare = max(WORTH, sum(tokens_of(shape, len(alike)) for shape, alike in groups) // 16)
        while len(groups) > 1:
            costs = []
            for i, ((one, ones), (other, others)) in enumerate(pairwise(groups)):
                both, apart = joined(one, other), tokens_of(one, len(ones)) + tokens_of(other, len(others))
                costs.append((tokens_of(both, len(ones) + len(others)) - apart, i, both))
            more, i, both = min(costs)
            spare -= more
            if spare < 0:
                break
            groups[i : i + 2] = [(both, groups[i][1] + groups[i + 1][1])]
        for shape, alike in groups:
            found[shape] += alike
    return found


def tokens_of(shape: Shape, questions: int) -> int:
    """That so many questions take."""
    choices, prefix, length = shape
    return questions * (prefix + choices * length)


def joined(one: Shape, other: Shape) -> Shape:
    """The smallest in which both find room."""
    prefix = min(one[1], other[1])
    return one[0], prefix, size_up(max(sum(one[1:]), sum(other[1:])) - prefix)


def arrays_of(batch: Sequence[Question], width: int, choices: int, prefix: int, length: int) -> tuple[np.ndarray, ...]:
    """What `make_score`'s function takes between the parameters and `chunks`. Rows are padded with 0, and questions
    with rows of which nothing is scored."""
    prefixes = np.zeros((width, prefix), np.int32)
    rows = np.zeros((width, choices, length), np.int32)
    starts, ends = np.ones((2, width, choices), np.int32)
    for i, question in enumerate(batch):
        prefixes[i] = question.rows[0][:prefix]
        for j, (row, (start, end)) in enumerate(zip(question.rows, question.spans)):
            rows[i, j, : len(row) - prefix] = row[prefix:]
            if start < end:
                starts[i, j], ends[i, j] = start - prefix, end - prefix
    return prefixes, rows, starts, ends
