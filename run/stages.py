"""The stages of a run's ramp: the sizes, the program and the batches of each. A constant batch is one stage."""

import time
from dataclasses import replace
from typing import Any, NamedTuple

from configs.messages import LOGGER
from configs.ramp import Ramp
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


class Program(NamedTuple):
    """A stage's compiled step."""

    first_step: int
    """Steps of the run before the stage."""
    train_step: TrainStep
    measuring_step: TrainStep
    """The same step with diagnostics."""


def stages_from(builds: list[Build], step: int) -> list[tuple[int, Build]]:
    """Return the stages that the run needs after `step`: the steps before each, and its build."""
    config = builds[-1].config
    ramp = Ramp.of(config.batch)
    return [(stage.step, built) for stage, built in zip(ramp.reached(config.steps), builds)][ramp.index(step) :]


def compile_stages(programs: list[Program], builds: list[Build], step: int, times: Times) -> None:
    """Compile the programs that the run needs after `step`, and add those missing in `programs`, in order. So a later
    stage's problems, memory included, show now. A compiled program refuses other shapes, so no step can recompile.
    Every process must call it, together with the others."""
    compiled = {program.first_step for program in programs}
    new = [(first_step, built) for first_step, built in stages_from(builds, step) if first_step not in compiled]
    if not new:
        return
    config, began = builds[-1].config, time.monotonic()
    every = config.diagnostics.every_steps
    with times.during("compile"):
        for first_step, built in new:
            taken: Any = [
                step.lower(built.abstract_state, built.abstract_batch()).compile() if needed else None
                for step, needed in ((built.train_step, every != 1), (built.measuring_step, every))
            ]
            programs.append(Program(first_step, taken[0] or taken[1], taken[1] or taken[0]))
    programs.sort(key=lambda program: program.first_step)
    if config.batch.ramp:
        LOGGER.info(f"compiled the programs of {len(new)} stage(s) in {time.monotonic() - began:.1f} s")


def step_after(programs: list[Program], step: int, measured_every: int) -> TrainStep:
    """Return the compiled `train_step` of training/step.py that follows `step`. With `measured_every` 0, none has
    diagnostics."""
    program = [program for program in programs if program.first_step <= step][-1]
    return program.measuring_step if measured_every and (step + 1) % measured_every == 0 else program.train_step


def batches_from(start: Start, builds: list[Build], text: Text) -> StepBatches:
    """Return the batches of the steps after `start`, in the shapes of their stages."""
    config, sharding = builds[0].config, builds[0].batch_sharding
    ramp, stages = Ramp.of(config.batch), {}
    last = config.steps - 1  # a run that was killed after its last step starts, and takes none
    for first_step, built in stages_from(builds, min(start.step, last)):
        first = max(first_step, start.step)
        row = (start.position + ramp.tokens(first) - ramp.tokens(start.step)) // config.batch.sequence_length
        mine = local_rows(built.batch_shape, sharding)
        stages[first - start.step] = StepBatches(
            text.train, text.mixture, config.seed, built.batch_shape, mine, text.document_bos, row
        )
    return replace(stages.pop(0), later=stages)


def describe(builds: list[Build]) -> str:
    """Return lines for the run, each stage of a ramp, the kernels, and slow links, if any."""
    built = builds[-1]
    lines = [describe_sizes(builds), describe_attention(built), note_on_slow_links(built.mesh)]
    return "\n".join(filter(None, lines))


def describe_sizes(builds: list[Build]) -> str:
    """Return a line for the run, and one for each stage of a ramp."""
    built, ramp = builds[-1], Ramp.of(builds[-1].config.batch)
    config, sizes = built.config, ["{} micro-batch(es) x {} rows x {} tokens".format(*of.batch_shape) for of in builds]
    run = (
        f"{config.name}: {sum(parameter_counts(config.model).values()):,} parameters, {built.dtype.name}, on "
        f"{built.mesh.size} {built.mesh.devices.flat[0].device_kind} device(s); {config.steps:,} steps, "
        f"{ramp.tokens(config.steps):,} tokens; a step: "
    )
    if not config.batch.ramp:
        return run + sizes[0]
    begins = lambda stage: f"from step {stage.step + 1:,} on, after {stage.tokens:,} tokens"
    last = lambda stage: "" if stage.step < config.steps else "; the run ends before"
    stages = (f"\n  {begins(stage)}: {size}{last(stage)}" for stage, size in zip(ramp.stages, sizes))
    return f"{run}a ramp of {len(sizes)} stages{''.join(stages)}"


def describe_attention(built: Build) -> str:
    """Return the kernel that computes attention and, if some blocks have windows, which ones, in a line."""
    config, length, head_dim = built.config, built.batch_shape[2], built.config.model.head_dim
    device, documents = built.mesh.devices.flat[0], config.data.mask_documents
    kernel = attention_kernel(device.platform, compute_capability(), built.dtype.name, length, head_dim, documents)
    windows = "".join("S" if window_of(config.model, layer) else "L" for layer in range(config.model.depth))
    suffix = f"; windows of the blocks: {windows}" * ("S" in windows)
    return f"attention: {described(kernel, length, head_dim)}{suffix}"
