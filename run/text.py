"""A run on text, or on conversations: what it opens, and its rows as the source of a step's batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from data.dataset import Text, open_text
from data.loader import StepBatches, local_rows, train_batches
from data.prompts import encode_prompts
from hosts.clock import running_seconds
from hosts.distributed import check_hosts_agree, on_every_process
from options.schema import Config
from options.validation import validate
from run.due import is_logged
from run.folder import RunFolder
from run.init_from import (
    origin_of,
    require_moments,
    require_same_network,
    require_same_vocabulary,
    why_no_new_tokenizer,
)
from run.source import ResumePoint, StepBatch
from system.files import cache_dir
from system.messages import LOGGER
from training.build import Build, build

FEW_STEPS = 20
"""A run of fewer is named: one epoch of a few hundred conversations is one step."""

Evaluate = Callable[[dict, Callable[[], bool]], dict[str, Any] | None]
"""The function from parameters and `should_stop` to an evaluation's results; None once `should_stop()`."""


def open_text_of_run(config: Config, folder: RunFolder) -> tuple[Build, Text]:
    """Return the run's build, with the steps of `epochs` for `steps=0`, and the text that it trains on. Raise UserError
    if the text, the prompts, or the network in `init_from` do not fit the run. Every process must call it."""
    built = build(config)
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    origin = origin_of(config, folder)

    def opened() -> Text:
        if origin:  # before text is prepared, which can take hours
            require_same_network(config, origin)
            if config.init_optimizer:
                require_moments(config, origin)
        no_new_tokenizer = why_no_new_tokenizer(origin) if origin else ""
        size = config.model.vocab_size
        text = open_text(config.data, size, length, micro_batches * rows, cache_dir(), no_new_tokenizer)
        encode_prompts(text.tokenizer, config.eval.prompts, length)  # a mistake, before any compute
        if origin:
            require_same_vocabulary(origin, text.tokenizer)
        return text

    text = on_every_process("their text", opened)
    check_hosts_agree("their text", text.fingerprint)
    if not config.steps:
        config = replace(config, steps=text.steps(config.epochs, micro_batches * rows))
        validate(config)
        if config.steps < FEW_STEPS:
            few = f"--epochs={config.epochs:g} of this text is only {config.steps} step(s)"
            LOGGER.info(f"{few}, in which a network learns little: give more --epochs")
        built = build(config)
    if text.too_long:
        LOGGER.info(text.too_long)
    LOGGER.info(text.validation_message(config.eval.tokens, length))
    if text.tokenizer.vocab_size < config.model.vocab_size:
        known = f"{text.tokenizer.vocab_size:,} of --model.vocab_size={config.model.vocab_size:,} tokens"
        LOGGER.info(f"the text's tokenizer has {known}: the others are never seen")
    if origin:
        LOGGER.info(f"starting from the network in {origin}")
    return built, text


class TextSource:
    """A text's rows in their order, from a point on. Batches are read ahead."""

    score = ("val_bpb", 1)
    loss_is_a_measure = True
    why_empty = ""

    def __init__(self, built: Build, text: Text, evaluator: Evaluate, resume_point: ResumePoint):
        config, shape, sharding = built.config, built.batch_shape, built.batch_sharding
        text = text.continued(resume_point.mixture, resume_point.tokens)
        self.config, self.text, self.evaluator = config, text, evaluator
        self.first_step = resume_point.step
        first_row = resume_point.tokens // config.batch.sequence_length
        mine = local_rows(shape, sharding)
        self.step_batches = StepBatches(
            text.train, text.mixture, config.seed, shape, mine, text.document_bos, first_row
        )
        self.batches = train_batches(self.step_batches, sharding, config.data.workers)

    @property
    def mixture(self) -> dict[str, Any]:
        """Return what a later start needs to know of the mixture of datasets."""
        return self.text.mixture.record()

    def batch(self, step: int, params: dict, should_stop: Callable[[], bool]) -> StepBatch:
        """Return the next batch and, for a logged step, the epochs of each dataset up to its end. Steps must follow
        each other."""
        asked = running_seconds()
        arrays = next(self.batches)
        waited = (asked, running_seconds())
        if not is_logged(step + 1, self.config):
            return StepBatch(arrays, {}, waited)
        rows_so_far = self.step_batches.first_row_of(step + 1 - self.first_step)
        return StepBatch(arrays, {"epochs": self.text.epochs(rows_so_far)}, waited)

    def rows_of(self, step: int) -> dict[str, list]:
        """Return a step's rows (dataset, row of it), and the beginnings of the first ones as text."""
        return self.text.preview_batch(self.step_batches.row_numbers(step - 1 - self.first_step))

    def evaluate(self, params: dict, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the figures of held-out text, and samples; None once `should_stop()`."""
        return self.evaluator(params, should_stop)

    def describe_step(self, line: dict) -> str:
        """Return the step's loss."""
        return f"loss {line['loss']:.4f}"

    def describe_evaluation(self, results: dict[str, Any]) -> list[str]:
        """Return the loss and the bits per byte of held-out text, and a benchmark's figure."""
        error = f" +- {error:.4f}" if (error := results.get("val_bpb_stderr")) else ""
        loss, bits = results["val_loss"], results["val_bpb"]
        of = ", ".join(f"{name} {part:.4f}" for name, part in results.get("val_bpb_of", {}).items() if part is not None)
        lines = [f"validation loss {loss:.4f}, {bits:.4f}{error} bits per byte{f' ({of})' * bool(of)}"]
        for name in {"core", "chatcore", "chatcore4"} & results.keys():
            interval = results[f"{name}_interval"]
            lines.append(f"{name} {results[name]:.4f} ({interval['low']:.4f} to {interval['high']:.4f})")
        return lines
