"""Answers generated together, token by token, in slots. Each slot's cache keeps the tokens that it has read.

A slot's row is an answer's prompt and its new tokens. What the cache has of a row is never read again: a new answer
takes the free slot that shares most with its prompt. The rest of a prompt is read in parts of two lengths, and new
tokens are drawn for all slots together, so there are three programs, whatever the prompts and the options.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from data.tokenizer import CHAT_TOKENS
from generation.calculator import calculate
from model.cache import LayerCache
from model.gpt import GPT, KVCache
from model.loss import softcap
from model.parallel import all_gather_vocabulary, pmax_over_tensor
from model.sampling import Sampling, draw
from options.schema import BATCH_AXES
from run.network import Network
from system.errors import UserError
from training.mesh import batch_devices, xla_options

SHORT, LONG = 32, 256  # tokens of a prompt read at a time
AHEAD = 4  # tokens drawn in one call
ROWS, CACHE = PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES, "tensor")


@dataclass(eq=False)
class Answer:
    """An answer, complete or in progress."""

    sampling: Sampling
    most: int
    """Tokens of the answer."""
    read: int
    """Tokens of the prompt that were read; the others were in a cache."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer so far, without its end."""
    drawn: list[bool] = field(default_factory=list)
    """For each token, whether the network drew it. The calculator wrote the others, which may be still to come."""
    end: list[int] = field(default_factory=list)
    """The token that ended the answer, once it is drawn."""
    finished: str = ""
    """`stop`: it has ended. `length`: it has its `most` tokens, or the row is full. Empty: it is being written."""
    call: list[int] | None = None
    """Tokens since <|python_start|>."""


@dataclass(eq=False)
class Slot:
    """A slot: its cache's contents, and its answer."""

    index: int
    row: list[int] = field(default_factory=list)
    """A prompt, the answer's tokens, and those that come next: drawn already, or a calculator's output."""
    given: int = 0
    """Tokens of the row before those that come next."""
    cached: int = 0
    """Tokens of the row that are in the cache."""
    answer: Answer | None = None

    def shares(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens are in the cache. At least one is left to read, for the next token."""
        most = min(self.cached, len(tokens) - 1)
        return next((i for i in range(most) if self.row[i] != tokens[i]), most)

    def follow_with(self, tokens: Sequence[int]) -> None:
        """Replace the tokens that come next."""
        self.row[self.given :] = tokens
        self.cached = min(self.cached, self.given)


class Parts(NamedTuple):
    """The next tokens of rows of the cache, and options to draw more. A device has its own rows."""

    slot: Int[Array, "rows"]
    """Number of the slot on its device."""
    tokens: Int[Array, "rows length_and_one"]
    """The row's next tokens, after the one before them."""
    start: Int[Array, "rows"]
    """Position of the second token. The cache's capacity if nothing of the row is read."""
    length: Int[Array, "rows"]
    sampling: Sampling


def next_tokens(model: GPT, layers: list[LayerCache], parts: Parts) -> tuple[list[LayerCache], Int[Array, "rows"]]:
    """Read a part of each row. Return the cache with it, and the tokens that are drawn to follow."""
    before = model.embedded(parts.tokens[:, :1])[:, 0]
    cache = KVCache(layers, jnp.where(parts.start[:, None] > 0, before, 0))
    x, cache = model.activations(parts.tokens[:, 1:], cache, parts.start[:, None])
    assert cache
    logits = model.lm_head(x[jnp.arange(len(x)), parts.length - 1])
    capped = softcap(all_gather_vocabulary(logits), model.config.softcap)
    return cache.layers, pmax_over_tensor(draw(capped, parts.start + parts.length, parts.sampling))


def read(model: GPT, layers: list[LayerCache], parts: Parts) -> tuple[list[LayerCache], Int[Array, "1"]]:
    """Read a part of one slot's row."""
    slot = parts.slot[0]
    row = jax.tree.map(lambda cached: jax.lax.dynamic_slice_in_dim(cached, slot, 1), layers)
    row, token = next_tokens(model, row, parts)
    put = lambda cached, new: jax.lax.dynamic_update_slice_in_dim(cached, new, slot, axis=0)
    return jax.tree.map(put, layers, row), token


def write(model: GPT, layers: list[LayerCache], parts: Parts) -> tuple[list[LayerCache], Int[Array, "slots ahead"]]:
    """Read a token of each slot, and draw AHEAD more."""

    def another(carry: tuple[list[LayerCache], Parts], _: None) -> tuple[tuple, Int[Array, "slots"]]:
        layers, parts = carry
        layers, new = next_tokens(model, layers, parts)
        tokens = jnp.concatenate([parts.tokens[:, 1:], new[:, None]], axis=1)
        return (layers, parts._replace(tokens=tokens, start=parts.start + 1)), new

    (layers, _), tokens = jax.lax.scan(another, (layers, parts), length=AHEAD)
    return layers, tokens.T


class Engine:
    """Call `begin` for each answer, and then `step` until it is finished."""

    def __init__(self, network: Network, slots: int = 1):
        """On a mesh, `slots` is rounded up to a multiple of the devices that rows are divided over. A network without
        parameters gets them later (`load`)."""
        mesh = network.sharded.mesh
        self.devices = batch_devices(mesh)
        self.slots_per_device = -(-slots // self.devices)  # on a device
        # Least recently used first. Those after each other are on different devices, which read at the same time.
        self.slots = [
            Slot(device * self.slots_per_device + i)
            for i in range(self.slots_per_device)
            for device in range(self.devices)
        ]
        self.capacity = network.config.batch.sequence_length  # tokens of a row
        self.tokenizer = network.tokenizer
        _, _, _, end, *self.tools = (self.tokenizer.special_tokens.get(name, -1) for name in CHAT_TOKENS)
        self.ends = {network.tokenizer.bos, end}
        over = network.sharded.on_gathered
        empty = lambda model: model.empty_cache(self.slots_per_device, self.capacity).layers
        outs = (NamedSharding(mesh, CACHE), NamedSharding(mesh, PartitionSpec()))
        self._empty = jax.jit(over(empty, (), CACHE), out_shardings=outs[0])
        # With JAX 0.10, XLA's fusions for YNNPACK take a CPU a third more time: few rows, and the sums of a draw.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        options = xla_options(mesh) | ({"xla_cpu_experimental_ynn_fusion_type": ""} if on_cpu else {})
        of_slots = partial(jax.jit, donate_argnums=1, out_shardings=outs, compiler_options=options)
        self._read = of_slots(over(read, (CACHE, ROWS), (CACHE, ROWS)))
        self._write = of_slots(over(write, (CACHE, ROWS), (CACHE, ROWS)))
        self._gather = jax.jit(network.sharded.gathered)
        self.params: dict = {}
        self.cache: list[LayerCache] | None = None
        if network.params:
            self.load(network.params)

    def compile(self) -> None:
        """Compile the programs, for which the first answers would wait."""
        for length in (SHORT, LONG):
            self._call(self._read, {}, self.devices, length)
        self._call(self._write, {}, len(self.slots), 1)

    def load(self, params: dict) -> None:
        """Take float32 parameters, drop every answer and forget what the caches have: as a new engine, without
        compiling. Until `unload`, each device keeps the parameters in the compute type, gathered over `data`."""
        self.params = self._gather(params)
        if self.cache is None:
            self.cache = self._empty(self.params)
        self.slots.sort(key=lambda slot: (slot.index % self.slots_per_device, slot.index))
        for slot in self.slots:
            slot.row, slot.given, slot.cached, slot.answer = [], 0, 0, None

    def unload(self) -> None:
        """Free the devices' memory of parameters and caches, until the next `load`."""
        self.params, self.cache = {}, None

    @property
    def free(self) -> int:
        """Return the number of free slots."""
        return sum(slot.answer is None for slot in self.slots)

    def begin(self, tokens: Sequence[int], sampling: Sampling, most: int | None = None) -> Answer:
        """Return an answer to a prompt, of at most `most` tokens, in a free slot. Raise UserError if the prompt leaves
        no room in the row."""
        if len(tokens) >= self.capacity:
            raise UserError(
                f"the prompt has {len(tokens)} tokens; the network's sequence has {self.capacity}, so at most "
                f"{self.capacity - 1} leave room for an answer"
            )
        shared = {slot: slot.shares(tokens) for slot in self.slots if slot.answer is None}
        # All conversations begin alike: a short common prefix does not justify overwriting a slot that was just used.
        slot = max(shared, key=lambda slot: shared[slot] if 2 * shared[slot] > slot.cached else 0)
        self.slots.remove(slot)
        self.slots.append(slot)
        slot.row, slot.given, slot.cached = list(tokens), len(tokens), shared[slot]
        sampling = sampling._replace(top_k=min(sampling.top_k, 2**31 - 1), seed=sampling.seed % (1 << 32))
        slot.answer = Answer(sampling, most or self.capacity, len(tokens) - slot.cached)
        return slot.answer

    def answers(self, asked: Iterable[tuple[Sequence[int], Sampling, int]]) -> Iterator[tuple[int, Answer]]:
        """Yield each prompt's place and its answer when it is finished. Every slot is kept busy."""
        waiting, writing = deque(enumerate(asked)), dict[Answer, int]()
        while waiting or writing:
            while waiting and self.free:
                place, (prompt, sampling, most) = waiting.popleft()
                writing[self.begin(prompt, sampling, most)] = place
            self.step()
            for answer in [one for one in writing if one.finished]:
                yield writing.pop(answer), answer

    def drop(self, answer: Answer) -> None:
        """End an answer, finished or not. Its slot is free, and keeps what it has read."""
        for slot in self.slots:
            if slot.answer is answer:
                slot.answer = None
                slot.follow_with([])

    def step(self) -> list[tuple[Answer, int]]:
        """Return a new token of each answer in progress. An answer that ends here has none, and is finished."""
        writing = [slot for slot in self.slots if slot.answer]
        while any(len(slot.row) == slot.given for slot in writing):
            self._advance(writing)
        new = []
        for slot in writing:
            answer, token = slot.answer, slot.row[slot.given]
            assert answer
            if token in self.ends:
                answer.finished, answer.end = "stop", [token]
            else:
                slot.given += 1
                answer.tokens.append(token)
                answer.drawn += [True] * (len(answer.tokens) - len(answer.drawn))
                new.append((answer, token))
                self._follow_call(slot, answer, token)
                if len(answer.tokens) == answer.most or slot.given == self.capacity:
                    answer.finished = "length"
            if answer.finished:
                self.drop(answer)
        return new

    def _follow_call(self, slot: Slot, answer: Answer, token: int) -> None:
        """Let the calculator's output follow the end of a call."""
        python_start, python_end, output_start, output_end = self.tools
        if token == python_start:
            answer.call = []
        elif token == python_end and answer.call is not None:
            result = calculate(self.tokenizer.decode(answer.call))
            answer.call = None
            if result is not None:
                output = [output_start, *self.tokenizer.encode([result])[0], output_end]
                slot.follow_with(output)
                answer.drawn += [False] * len(output)
        elif answer.call is not None:
            answer.call.append(token)

    def _advance(self, writing: Sequence[Slot]) -> None:
        """Read parts of prompts, of one slot on each device; if none is left to read, draw for all slots."""
        unread = {
            slot.index // self.slots_per_device: slot for slot in reversed(writing) if len(slot.row) - slot.cached > 1
        }
        if unread:
            most = max(len(slot.row) - slot.cached for slot in unread.values())
            length = LONG if most > LONG // 2 else SHORT
            tokens = self._call(self._read, unread, self.devices, length)
            for place, slot in unread.items():
                self._take(slot, length, tokens[place : place + 1])
            return
        rows = {slot.index: slot for slot in writing if len(slot.row) - slot.given < AHEAD}
        tokens = self._call(self._write, rows, len(self.slots), 1)
        for place, slot in rows.items():
            self._take(slot, AHEAD, tokens[place])

    def _take(self, slot: Slot, read: int, tokens: np.ndarray) -> None:
        """Count the tokens read of a slot. After all of its row, drawn tokens come next."""
        if len(slot.row) - slot.cached <= read:
            slot.row += tokens.tolist()
            slot.cached = len(slot.row) - 1
        else:
            slot.cached += read

    def _call(self, program: Callable, slots: dict[int, Slot], rows: int, length: int) -> np.ndarray:
        """Continue the slots' rows with at most `length` unread tokens. Return the tokens that follow."""
        self.cache, following = program(self.params, self.cache, self.parts(slots, rows, length))
        return np.asarray(following)

    def parts(self, slots: dict[int, Slot], rows: int, length: int) -> Parts:
        """Return the next tokens, at most `length`, of the slots at these of `rows` places. Nothing is read at the
        others."""
        ints: Any = lambda *shape: np.zeros(shape, np.int32)  # a jitted program takes NumPy's arrays, too
        options: Any = np.zeros(rows, np.float32), ints(rows), np.ones(rows, np.float32), np.zeros(rows, np.uint32)
        numbers, tokens = ints(rows), ints(rows, 1 + length)
        starts, lengths = ints(rows) + self.capacity, ints(rows) + 1
        for place, slot in slots.items():
            assert slot.answer
            unread = slot.row[slot.cached :][:length]
            numbers[place], starts[place], lengths[place] = slot.index % self.slots_per_device, slot.cached, len(unread)
            tokens[place, : 1 + len(unread)] = [slot.row[slot.cached - 1] if slot.cached else 0, *unread]
            for array, value in zip(options, slot.answer.sampling):
                array[place] = value
        return Parts(numbers, tokens, starts, lengths, Sampling(*options))
