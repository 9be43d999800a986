"""The evaluation of a run: held-out loss and bits per byte, and continuations of prompts."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from data.dataset import Text, shortest
from data.held_out import HeldOut, read_held_out
from data.prompts import encode_prompts
from evaluation.statistics import ratio
from generation.continuations import continuations
from generation.engine import Engine
from hosts.distributed import on_every_process
from model.sampling import Sampling
from options.schema import with_options
from run.network import Network
from training.build import Build
from training.step import Batch, EvalStep


class Interrupted(Exception):
    """Raised in an evaluation that was asked to stop."""


Benchmark = Callable[[dict, Callable[[], bool]], dict[str, Any]]
"""The function from parameters and `should_stop` to a benchmark's figures, which raises Interrupted once
`should_stop()`."""


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


class Evaluator:
    """Held-out rows and prompts, on the devices. Called with parameters, it returns `val_loss`, `val_bpb` and
    `samples`, and the figures of a benchmark. Between calls it holds no parameters and no caches."""

    def __init__(self, built: Build, text: Text, benchmark: Benchmark | None = None):
        """Raise UserError for a prompt that leaves no room for a continuation, or a row that cannot be read. Every
        process must make one."""
        config = built.config
        self.built, self.text, self.benchmark = built, text, benchmark

        def read() -> tuple[list[list[int]], HeldOut]:
            prompts = encode_prompts(text.tokenizer, text.prompts(config.eval.prompts), config.batch.sequence_length)
            return prompts, read_held_out(
                text.val,
                text.weights,
                config.eval.tokens,
                text.tokenizer,
                built.batch_shape,
                built.batch_sharding,
                text.document_bos,
            )

        self.prompts, held_out = on_every_process("the held-out rows", read)
        self.batches, self.text_bytes = held_out.batches, held_out.text_bytes()
        longest = max(map(len, self.prompts), default=0) + config.eval.sample_tokens
        row = {"batch.sequence_length": min(longest, config.batch.sequence_length)}
        network = Network(with_options(config, row), text.tokenizer, {}, built.network)
        self.engine = Engine(network, len(self.prompts)) if self.prompts else None

    def __call__(self, params: dict, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the figures of float32 parameters, as after a step; None once `should_stop()`, which is asked between
        batches and before the samples. Every process must call it."""

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
        return {**results, "samples": self.samples(params)}

    def samples(self, params: dict) -> list[str]:
        """Return the prompts with continuations by the network."""
        if self.engine is None:
            return []
        self.engine.load(params)
        sampling = Sampling(seed=self.built.config.seed)
        try:
            return continuations(self.engine, self.prompts, self.built.config.eval.sample_tokens, sampling)
        finally:
            self.engine.unload()
