"""The compiled programs of a run's step, and lines that describe them."""

from typing import Any, NamedTuple

from configs.messages import LOGGER
from model.gpt import parameter_counts
from model.kernels import attention_kernel, described, window_of
from model.parallel import compute_capability
from run.clock import Times
from training.build import Build
from training.mesh import note_on_slow_links
from training.step import TrainStep


class TrainSteps(NamedTuple):
    """The compiled `train_step` of training/step.py, with and without diagnostics."""

    train_step: TrainStep
    measuring_step: TrainStep
    """The same step with diagnostics."""


def compile_train_steps(built: Build, times: Times) -> TrainSteps:
    """Compile the programs that the run needs. A compiled program refuses other shapes, so no step can recompile. Every
    process must call it, together with the others."""
    every = built.config.diagnostics.every_steps
    LOGGER.info("compiling")
    with times.during("compile"):
        compiled: Any = [
            step.lower(built.abstract_state, built.abstract_batch()).compile() if needed else None
            for step, needed in ((built.train_step, every != 1), (built.measuring_step, every))
        ]
    return TrainSteps(compiled[0] or compiled[1], compiled[1] or compiled[0])


def describe(built: Build) -> str:
    """Return lines for the run, its kernels, and slow links, if any."""
    lines = [describe_sizes(built), describe_attention(built), note_on_slow_links(built.mesh)]
    return "\n".join(filter(None, lines))


def describe_sizes(built: Build) -> str:
    """Return a line for the run and the sizes of its step."""
    config, (micro_batches, rows, length) = built.config, built.batch_shape
    return (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps; a "
        f"step: {micro_batches} micro-batch(es) x {rows} rows x {length} tokens"
    )


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    of_rows, own = (built.dtype.name, length, head_dim, documents), "attention" in config.model.kernels
    kernel = attention_kernel(device.platform, compute_capability(), *of_rows, own)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    suffix = f"; window of each block: {windows} (S short, L long)" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{suffix}"
