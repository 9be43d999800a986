"""Questions to a network on the mesh: the losses of their answers' tokens.

Parameters stay sharded, as in a step; questions are divided over `data` and `fsdp`. The common beginning of a
question's options is read once, into a cache of keys and values from which each option continues. Lengths are rounded
to a few sizes, so few programs are compiled. Only scored tokens get logits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from model.gpt import GPT
from model.loss import log_sum_and_target, softcap
from model.parallel import mark_varying, pmax_over_tensor, tensor_index
from options.schema import BATCH_AXES
from run.network import Network
from system.progress import progress
from training.mesh import batch_devices, xla_options
from training.sharded import ShardedNetwork

MIN_SHARED = 16  # tokens
WORTH = 2048  # tokens: a program that saves no more is not worth compiling
ROWS = PartitionSpec(BATCH_AXES)


class Question(NamedTuple):
    """A question: options as tokens, one row each. Some tokens of each row are scored."""

    index: int
    """The question's number, for the caller."""
    rows: list[Int[np.ndarray, "_"]]
    spans: list[tuple[int, int]]
    """First token of each row that is scored, and the one after the last."""
    cut: int
    """Tokens that the longest row lost at its front."""


class Scores(NamedTuple):
    """Scores of the options of one or several questions."""

    losses: Float[Array, "*options length"]
    """Nats of the scored tokens, in their order; 0 after them."""
    likeliest: Bool[Array, "*options"]
    """True for each scored token that is the likeliest at its place (the first of several), as argmax finds it."""
    margins: Float[Array, "*options"]
    """The smallest lead of a scored token's capped logit over the highest other one."""


def size_up(length: int) -> int:
    """Return the next larger of the sizes 8, 16, ..., 128, 144, 160, ...: at least eight in each octave from 64 on."""
    step = max(8, 1 << max((length - 1).bit_length() - 4, 0))
    return -(-length // step) * step


def size_down(length: int) -> int:
    """Return the next smaller of `size_up`'s sizes; 0 for a prefix that is not worth a pass of its own."""
    step = max(8, 1 << max(length.bit_length() - 4, 0))
    return length // step * step if length >= MIN_SHARED else 0


def chunk_of(rows: int) -> int:
    """Return the number of scored tokens whose logits a device computes at a time, for this number of rows."""
    return min(256, 16 * rows)


def make_score(network: ShardedNetwork, row: int) -> Callable[..., Scores]:
    """Return `score(params, prefixes [B, P], rows [B, C, T + 1], starts [B, C], ends [B, C], chunks) -> Scores [B, C]`,
    compiled once per shape of the arrays. Every process gives the same arrays and gets all scores.

    Each of a question's C options is its prefix, then its row. The tokens of the row from `starts` (at least 1) up to
    `ends` are scored: on a device, at most `chunks` times `chunk_of` its rows. B divides over `data` and `fsdp`. A
    token sees at most `row` tokens back, as many as training's rows have.
    """

    def score(model: GPT, prefixes: Array, rows: Array, starts: Array, ends: Array, chunks: Array) -> Scores:
        questions, choices, _ = rows.shape
        tokens, counts = rows.reshape(-1, rows.shape[2]), (ends - starts).ravel()
        inputs = tokens[:, :-1]  # nothing comes after the last one
        shared, cache = prefixes.shape[1], None
        if shared + inputs.shape[1] > row:
            for block in model.blocks:
                block.attention.window = min(block.attention.window or row, row)
        if shared:
            _, cache = model.activations(prefixes, model.empty_cache(questions, shared + inputs.shape[1]))
            cache = jax.tree.map(lambda kept: jnp.repeat(kept, choices, axis=0), cache)
        x, _ = model.activations(inputs, cache, start=shared)
        size = chunk_of(len(tokens))
        upto = jnp.cumsum(counts)  # scored tokens of the rows up to each, counted one after the other

        def chunk(i: Array, of_tokens: Scores) -> Scores:
            number = i * size + jnp.arange(size)
            row = jnp.searchsorted(upto, number, side="right")  # beyond the last one: none, and dropped below
            place = number - (upto - counts)[row]
            token = starts.ravel()[row] + place
            logits = model.lm_head(x[row, token - 1])
            scores = Scores(*token_scores(logits, tokens[row, token], network.config.softcap))
            return jax.tree.map(lambda all, new: all.at[row, place].set(new, mode="drop"), of_tokens, scores)

        of_tokens = Scores(jnp.zeros(tokens.shape), jnp.ones(tokens.shape, bool), jnp.full(tokens.shape, jnp.inf))
        losses, likeliest, margins = jax.lax.fori_loop(0, chunks, chunk, mark_varying(of_tokens, BATCH_AXES))
        of_rows = Scores(losses, jnp.all(likeliest, axis=1), jnp.min(margins, axis=1))
        return jax.tree.map(lambda array: array.reshape(questions, choices, *array.shape[1:]), of_rows)

    specs = (ROWS, ROWS, ROWS, ROWS, PartitionSpec())
    mesh, of_arrays = network.mesh, network.on_mesh(score, specs, ROWS)
    replicated = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(of_arrays, out_shardings=replicated, compiler_options=xla_options(mesh))

    def put(array: np.ndarray, spec: PartitionSpec) -> Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda part: array[part])

    return lambda params, *arrays: jax.device_get(compiled(params, *map(put, arrays, specs)))


class Scorer:
    """Scores questions. Called with parameters and questions, it yields each question with its scores, grouped by
    shape. Every process must consume all of it."""

    def __init__(self, network: Network, longest: int | None = None):
        """Take `longest`: the most tokens that the network reads; by default the length of a row in training."""
        batch, on_mesh = network.config.batch, network.sharded
        self.longest = longest or batch.sequence_length
        self.facts = {"dtype": on_mesh.dtype.name, "longest": self.longest, "window": batch.sequence_length}
        """The facts, other than parameters and questions, that scores depend on."""
        self.tokens_per_device = batch.rows * batch.sequence_length
        self.replicas = batch_devices(on_mesh.mesh)
        self.score = make_score(on_mesh, batch.sequence_length)

    def __call__(self, params: dict, questions: Sequence[Question]) -> Iterator[tuple[Question, Scores]]:
        hidden = jax.process_index() > 0
        bar = progress(total=len(questions), unit="questions", desc="scoring", leave=False, disable=hidden)
        for shape, alike in by_shape(questions).items():
            fit = self.replicas * max(1, self.tokens_per_device // tokens_of(shape, 1))
            batches = -(-len(alike) // fit)
            a_device = -(-len(alike) // (self.replicas * batches))  # equal numbers, so that few rows are empty
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


def token_scores(
    logits: Float[Array, "tokens vocab_share"], targets: Int[Array, "tokens"], cap: float
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"], Float[Array, "tokens"]]:
    """Return each target's loss, whether it is the likeliest token, and the lead of its capped logit over all
    others."""
    log_sum, target = log_sum_and_target(logits, targets, cap)
    token = tensor_index() * logits.shape[-1] + jnp.arange(logits.shape[-1])

    def maximum(among: Array) -> Array:
        """Return the highest logit, capped. The cap keeps the order, so only the highest are capped."""
        return softcap(pmax_over_tensor(jnp.max(jnp.where(among, logits, -jnp.inf), axis=-1)), cap)

    before, after = maximum(token < targets[:, None]), maximum(token > targets[:, None])
    return log_sum - target, (target > before) & (target >= after), target - jnp.maximum(before, after)


Shape = tuple[int, int, int]
"""The shape `(C, P, T)` of questions computed together: options, tokens of the common prefix, and tokens read of each
row after it. The last token of a row is not read."""


def shape_of(question: Question) -> Shape:
    """Return the shape that fits a question most closely."""
    rows, starts = question.rows, [start for start, end in question.spans if start < end]
    prefix = size_down(min([common_prefix(rows), *starts]) - 1)
    return len(rows), prefix, size_up(max(1, max(map(len, rows)) - 1 - prefix))


def common_prefix(rows: Sequence[Int[np.ndarray, "_"]]) -> int:
    """Return the number of first tokens that all rows share."""
    shortest = min(map(len, rows))
    differ = np.any([row[:shortest] != rows[0][:shortest] for row in rows], axis=0)
    return int(np.argmax(differ)) if differ.any() else shortest


def by_shape(questions: Sequence[Question]) -> dict[Shape, list[Question]]:
    """Return questions by the shape of their program. To keep programs few, neighbouring shapes are joined while that
    costs at most a sixteenth more tokens in total, or `WORTH`."""
    fitting, grouped = defaultdict(list), defaultdict(list)
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
            grouped[shape] += alike
    return grouped


def tokens_of(shape: Shape, questions: int) -> int:
    """Return the tokens that are read of this number of questions."""
    choices, prefix, length = shape
    return questions * (prefix + choices * length)


def joined(one: Shape, other: Shape) -> Shape:
    """Return the smallest shape in which both find room."""
    prefix = min(one[1], other[1])
    return one[0], prefix, size_up(max(sum(one[1:]), sum(other[1:])) - prefix)


def arrays_of(batch: Sequence[Question], width: int, choices: int, prefix: int, length: int) -> tuple[np.ndarray, ...]:
    """Return the arguments of `make_score`'s function between the parameters and `chunks`. Rows are padded with 0, and
    questions with rows without scored tokens."""
    prefixes = np.zeros((width, prefix), np.int32)
    rows = np.zeros((width, choices, length + 1), np.int32)
    starts, ends = np.ones((2, width, choices), np.int32)
    for i, question in enumerate(batch):
        prefixes[i] = question.rows[0][:prefix]
        for j, (row, (start, end)) in enumerate(zip(question.rows, question.spans)):
            rows[i, j, : len(row) - prefix] = row[prefix:]
            if start < end:
                starts[i, j], ends[i, j] = start - prefix, end - prefix
    return prefixes, rows, starts, ends
