"""What a run measures of its network while it trains: loss and bits per byte of held-out text, and samples."""

from typing import Any

from data.dataset import Text
from data.loader import held_out_batches
from evaluation.bits_per_byte import evaluate
from evaluation.generation import continuations, encode_prompts, make_generate
from training.build import Build


class Evaluator:
    """Held-out rows and prompts, on the devices; called with parameters, it gives `val_loss`, `val_bpb`, `samples`."""

    def __init__(self, built: Build, text: Text, document_bos: int | None):
        """UserError for a prompt that leaves no room for a continuation."""
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
            document_bos,
        )

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
