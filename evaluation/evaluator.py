"""The evaluation of a run: held-out loss and bits per byte, and continuations of prompts."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import takewhile
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from data.dataset import Text, shortest
from data.loader import held_out_batches
from data.tokenizer import TextTokenizer
from evaluation.statistics import ratio
from hosts.distributed import on_every_process
from model import sampling
from system.errors import UserError
from training.build import Build
from training.mesh import xla_options
from training.sharded import ShardedNetwork
from training.step import Batch, EvalStep


class Interrupted(Exception):
    """Raised in an evaluation that was asked to stop."""


Generate = Callable[..., Int[Array, "batch length"]]


def evaluate(
    eval_step: EvalStep,
    params: dict,
    batches: list[Batch],
    text_bytes: Int[np.ndarray, "datasets micro_batches"],
    watched: Callable[[list], Iterable[Batch]] = iter,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return `val_loss` in nats a token, and `val_bpb` in bits a byte with its standard error `val_bpb_stderr`.

    They count every target that represents text (not the BOS, as in nanochat). In conversations they count every token
    that an assistant writes, end tokens included. The shape of the batches and the mesh do not change the two means.
    The standard error is over each dataset's micro-batches, stretches of its held-out text; it is None if a dataset has
    a single one. `text_bytes` has the bytes of each micro-batch, under its dataset. With two or more `names` of
    datasets, `val_bpb_of` has the bits per byte of each. `watched` yields the batches, and may show the progress. The
    devices have at most two of them to do, so an exception of `watched` ends the work soon.
    """
    sums = []
    for batch in watched(batches):
        sums.append(eval_step(params, batch))
        jax.block_until_ready(sums[-2:-1])
    losses, counts = (np.concatenate(parts) for parts in zip(*(map(np.asarray, pair) for pair in sums)))
    of_all = text_bytes.sum(axis=0)
    some = of_all > 0  # a micro-batch may hold no row
    sources = np.argmax(text_bytes[:, some] > 0, axis=0)
    _, error = ratio((losses[some] / math.log(2)).tolist(), of_all[some].tolist(), sources.tolist())

    def bits(sizes: np.ndarray) -> float | None:
        """Return the bits per byte of a source; None without a byte."""
        return math.fsum(losses[sizes > 0]) / math.log(2) / int(sizes.sum()) if sizes.any() else None

    results: dict[str, Any] = {
        "val_loss": math.fsum(losses) / int(counts.sum()),
        "val_bpb": math.fsum(losses) / math.log(2) / int(of_all.sum()),
        "val_bpb_stderr": error,
    }
    return results | ({"val_bpb_of": dict(zip(names, map(bits, text_bytes)))} if len(names) > 1 else {})


def make_generate(network: ShardedNetwork) -> Generate:
    """Return `generate(params, prompts, prompt_lengths, seeds, *, prefill, temperature, top_k) -> tokens`, jitted:
    compiled once per shape of prompts. `params` are the state's float32 shares; `model.sampling.generate` describes the
    rest. Every device writes all texts; only `fsdp` and `tensor` share that work."""
    everywhere = PartitionSpec()

    @partial(jax.jit, static_argnames=("prefill", "temperature", "top_k"), compiler_options=xla_options(network.mesh))
    def generate(params: dict, *arrays: Int[Array, "..."], **options: float | int) -> Int[Array, "batch length"]:
        write = partial(sampling.generate, **options)  # pyright: ignore[reportArgumentType]
        return network.on_mesh(write, [everywhere] * 3, everywhere)(params, *arrays)

    return generate


def encode_prompts(tokenizer: TextTokenizer, prompts: Sequence[str], capacity: int) -> list[list[int]]:
    """Return each prompt's tokens after a BOS. Raise UserError for one that leaves no room for a continuation in
    `capacity`."""
    encoded = [[tokenizer.bos, *ids] for ids in tokenizer.encode(prompts)]
    for prompt, ids in zip(prompts, encoded):
        if len(ids) >= capacity:
            raise UserError(
                f"the prompt {prompt[:40]!r}... has {len(ids)} tokens with the BOS; the network's sequence has "
                f"{capacity}, so at most {capacity - 1} leave room for a continuation"
            )
    return encoded


def continuations(
    generate: Generate,
    params: dict,
    tokenizer: TextTokenizer,
    prompts: list[list[int]],
    *,
    tokens: int,
    capacity: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> list[str]:
    """Return each prompt (of `encode_prompts`) as text, with up to `tokens` sampled tokens after it, until its document
    ends. `generate` is of `make_generate`, `params` the state's. Every process must call it."""
    if not prompts:
        return []
    prefill, shape = min(map(len, prompts)), (len(prompts), min(max(map(len, prompts)) + tokens, capacity))
    buffer, lengths = np.zeros(shape, np.int32), np.array([*map(len, prompts)], np.int32)
    for row, ids in zip(buffer, prompts):
        row[: len(ids)] = ids
    seeds = np.random.default_rng(seed).integers(1 << 31, size=len(prompts)).astype(np.int32)
    options = {"prefill": prefill, "temperature": temperature, "top_k": top_k}
    filled = np.asarray(generate(params, buffer, lengths, seeds, **options)).tolist()
    new = [takewhile(lambda i: i != tokenizer.bos, row[len(ids) :][:tokens]) for row, ids in zip(filled, prompts)]
    return [tokenizer.decode([*ids[1:], *more]) for ids, more in zip(prompts, new)]


class Evaluator:
    """Held-out rows and prompts, on the devices. Called with parameters, it returns `val_loss`, `val_bpb` and
    `samples`, and the figures of `eval.tasks`."""

    def __init__(self, built: Build, text: Text):
        """Raise UserError for a prompt that leaves no room for a continuation, or a row that cannot be read. Every
        process must make one."""
        config = built.config
        self.built, self.text, self.tokenizer = built, text, text.tokenizer

        def read() -> tuple[list[list[int]], tuple[list[Batch], Int[np.ndarray, "datasets micro_batches"]]]:
            prompts = encode_prompts(text.tokenizer, text.prompts(config.eval.prompts), config.batch.sequence_length)
            return prompts, held_out_batches(
                text.val,
                text.weights,
                config.eval.tokens,
                text.tokenizer,
                built.batch_shape,
                built.batch_sharding,
                text.document_bos,
            )

        self.prompts, (self.batches, self.text_bytes) = on_every_process("the held-out rows", read)
        self.generate = make_generate(built.network)
        # By its name: a run without a benchmark loads nothing of it.
        of_run = import_module("evaluation.benchmark").benchmark_of_run if config.eval.tasks else None
        self.benchmark = of_run(built, text) if of_run else None

    def __call__(self, params: dict, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the figures of float32 parameters, as after a step; None once `should_stop()`, which is asked between
        batches and before the samples. Every process must call it."""
        config = self.built.config

        def until_asked(batches: list[Batch]) -> Iterator[Batch]:
            for batch in batches:
                if should_stop():
                    raise Interrupted
                yield batch

        try:
            names = shortest(self.text.names)
            results = evaluate(self.built.eval_step, params, self.batches, self.text_bytes, until_asked, names)
            results |= self.benchmark(params, should_stop) if self.benchmark else {}
        except Interrupted:
            return None
        if should_stop():
            return None
        samples = continuations(
            self.generate,
            params,
            self.tokenizer,
            self.prompts,
            tokens=config.eval.sample_tokens,
            capacity=config.batch.sequence_length,
            seed=config.seed,
        )
        return {**results, "samples": samples}
