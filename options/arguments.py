"""Options of several commands that are not a run's. Without imports that take long."""

from dataclasses import dataclass

from options.schema import AnyPath, MeshConfig, NotNegative, Positive


@dataclass(frozen=True)
class StartArguments:
    """Options of a start of train.py or reinforce.py, not of the run."""

    accept_changes: bool = False
    """Resume a run although options that change its result differ from the first start's. config.json and metrics.jsonl
    record the changes."""
    resume_step: Positive[int] | None = None
    """Continue from the checkpoint of this step, and move newer ones to newer-checkpoints/. After a jump of the loss,
    another `--seed` with `--accept_changes` gives the coming steps other rows."""


@dataclass(frozen=True)
class SamplingArguments:
    """Options of the commands that draw text."""

    run_dir: AnyPath
    """Folder of the run whose newest checkpoint is used, here or at gs://."""
    step: Positive[int] | None = None
    """The checkpoint's step; default: the newest."""
    temperature: NotNegative[float] = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: NotNegative[int] = 50
    """Draw from this many likeliest tokens, and from all that are as likely as the last of them; 0 draws from all."""
    seed: NotNegative[int] = 0
    """Seed of the draws."""
    mesh: MeshConfig = MeshConfig(data=1)
    """Arrangement of this many of the devices here, whatever the run's own; `fsdp` and `tensor` for a network too large
    for one."""
