"""Lines that describe a run and its start to a person."""

from configs.ramp import Ramp
from configs.schema import Config
from model.kernels import attention_kernel, described, window_of
from model.parallel import compute_capability
from model.shapes import parameter_counts
from training.build import Build
from training.mesh import note_on_slow_links


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


def describe_start(config: Config) -> str:
    """Return a line on the start of a run with `init_from`. At full rates without a warmup, it advises on new text."""
    line, optimizer = f"starting from the network in {config.init_from}", config.optimizer
    if optimizer.rate_factor < 1 or optimizer.schedule.warmup_steps:
        return line
    gentle = f"--optimizer.rate_factor=0.1 --optimizer.schedule.warmup_steps={-(-config.steps // 20)}"
    return f"{line}, at full rates: it forgets much of its old text; to keep it, train with {gentle}"
