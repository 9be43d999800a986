"""The compiled programs of a run's step, its batches, and lines that describe them."""

from typing import Any, NamedTuple

from data.dataset import Text
from data.loader import StepBatches, local_rows
from model.gpt import parameter_counts
from model.kernels import attention_kernel, described, window_of
from model.parallel import compute_capability
from run.progress import Start
from run.times import Times
from training.build import Build
from training.mesh import note_on_slow_links
from training.step import TrainStep


class TrainSteps(NamedTuple):
    """The compiled `train_step` of training/step.py, with and without diagnostics."""

    train_step: TrainStep
    measuring_step: TrainStep
    """The same step with diagnostics."""

    def after(self, step: int, measured_every: int) -> TrainStep:
        """Return the program of the step that follows `step`. With `measured_every` 0, none has diagnostics."""
        return self.measuring_step if measured_every and (step + 1) % measured_every == 0 else self.train_step


def compile_train_steps(built: Build, times: Times) -> TrainSteps:
    """Compile the programs that the run needs. A compiled program refuses other shapes, so no step can recompile. Every
    process must call it, together with the others."""
    every = built.config.diagnostics.every_steps
    with times.during("compile"):
        taken: Any = [
            step.lower(built.abstract_state, built.abstract_batch()).compile() if needed else None
            for step, needed in ((built.train_step, every != 1), (built.measuring_step, every))
        ]
    return TrainSteps(taken[0] or taken[1], taken[1] or taken[0])


def batches_after(start: Start, built: Build, text: Text) -> StepBatches:
    """Return the batches of the steps after `start`."""
    config, shape = built.config, built.batch_shape
    row = start.tokens // config.batch.sequence_length
    mine = local_rows(shape, built.batch_sharding)
    return StepBatches(text.train, text.mixture, config.seed, shape, mine, text.document_bos, row)


def describe(built: Build) -> str:
    """Return lines for the run, its kernels, and slow links, if any."""
    lines = [describe_sizes(built), describe_attention(built), note_on_slow_links(built.mesh)]
    return "\n".join(filter(None, lines))


def describe_sizes(built: Build) -> str:
    """Return a line for the run and the sizes of its step."""
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    return (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps, "
        f"{config.steps * config.batch.tokens_per_step:,} tokens; a step: "
        f"{micro_batches} micro-batch(es) x {rows} rows x {length} tokens"
    )


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    kernel = attention_kernel(device.platform, compute_capability(), built.dtype.name, length, head_dim, documents)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    suffix = f"; windows of the blocks: {windows}" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{suffix}"
