"""What a run measures of its network while it trains: loss and bits per byte of held-out text, samples, benchmarks."""

from typing import Any

from data.dataset import Text
from data.loader import held_out_batches
from evaluation.bits_per_byte import evaluate
from evaluation.core import READS, Core, read_bundle
from evaluation.generation import continuations, encode_prompts, make_generate
from evaluation.scorer import Scorer
from training.build import Build


class Evaluator:
    """Held-out rows and prompts, on the devices; called with parameters, it gives `val_loss`, `val_bpb`, `samples`, and
    `tasks` gives the figures of benchmarks."""

    def __init__(self, built: Build, text: Text):
        """UserError for a prompt that leaves no room for a continuation, and for a bundle that is not whole."""
        config = built.config
        self.built, self.tokenizer = built, text.tokenizer
        self.prompts = encode_prompts(text.tokenizer, config.eval.prompts, config.batch.sequence_length)
        self.generate = make_generate(config.model, built.dtype, built.mesh)
        self.batches, self.text_bytes = held_out_batches(
            text.val,
            text.weights,
            config.eval.tokens,
            text.tokenizer.token_bytes,
            built.batch_shape,
            built.batch_sharding,
            text.document_bos,
        )
        if config.eval.tasks:
            tasks = read_bundle(config.eval.bundle, config.eval.items)
            scorer = Scorer(config.model, config.batch, built.dtype, built.mesh, READS * config.batch.sequence_length)
            self.benchmarks = Core(tasks, text.tokenizer, scorer)

    def __call__(self, params: dict) -> dict[str, Any]:
        """Of float32 parameters as a step leaves them. Every process must call it."""
        config = self.built.config
        results = evaluate(self.built.eval_step, params, self.batches, self.text_bytes)
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

    def tasks(self, params: dict) -> dict[str, Any]:
        """`core` and `core_stderr`, and of each task `core_tasks`: its centred accuracy. Where `eval.tasks` says so.
        Every process must call it."""
        results = self.benchmarks(params)
        centered = {label: task["centered"] for label, task in results["tasks"].items()}
        ties = sum(task["ties"] for task in results["tasks"].values())
        return {**{name: results[name] for name in ("core", "core_stderr")}, "core_ties": ties, "core_tasks": centered}
