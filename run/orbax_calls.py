"""All that is asked of Orbax. What of its layout on the disk is relied on are the four names below.

Its restore through a manager ends in a barrier, where a process that cannot read leaves the others; so arrays are read
by the handler, which waits for nobody. The barriers of saving go through JAX's service, with a limit, and not through
the devices.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from configs.schema import CheckpointConfig

COMMITTED = "commit_success.txt"  # in a bucket: written last
FACTS = "facts/metadata"  # the item saved as JSON; on a disk the folder is renamed when all items are written
HALF_DONE = ".orbax-checkpoint-tmp"  # ends the name of a folder that is being written
ITEMS = ("params", "rest", "facts")  # a folder each

_opened = itertools.count()  # for names of barriers, which must not come twice; the same on every process


class Info(NamedTuple):
    """What the preservation policies ask of a checkpoint."""

    step: int
    metrics: dict[str, float] | None
    """`val_bpb`, where it was evaluated."""
    time: datetime | None = None


def open_manager(folder: epath.Path) -> ocp.CheckpointManager:
    """Saves to `folder`, which must be there. Waits for no other process."""
    everyone = set(range(jax.process_count())) if jax.process_count() > 1 else None
    prefix = f"checkpoints-{next(_opened)}"
    processes = ocp.options.MultiprocessingOptions(active_processes=everyone, barrier_sync_key_prefix=prefix)
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=processes)
    return ocp.CheckpointManager(folder, options=options, item_names=ITEMS)


def save(manager: ocp.CheckpointManager, step: int, params: Any, rest: Any, facts: dict) -> None:
    """Copies the arrays off the devices, and writes all in the background."""
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(params),  # pyright: ignore[reportCallIssue]
        rest=ocp.args.StandardSave(rest),  # pyright: ignore[reportCallIssue]
        facts=ocp.args.JsonSave(facts),  # pyright: ignore[reportCallIssue]
    )
    manager.save(step, args=items, force=True)


def read_arrays(folder: epath.Path, abstract: Any) -> Any:
    """This process's parts of the arrays in an item's folder, padded and sharded as `abstract` is, which may be some of
    them. Waits for no other process."""
    # Not strict: the mesh that saved the arrays may have padded them otherwise.
    arguments = ocp.checkpoint_utils.construct_restore_args(abstract, strict=False)
    restore = ocp.args.PyTreeRestore(abstract, arguments, partial_restore=True)  # pyright: ignore[reportCallIssue]
    return ocp.PyTreeCheckpointHandler().restore(folder, args=restore)


def read_facts(folder: epath.Path) -> dict:
    """What was saved as JSON in a checkpoint's folder."""
    return json.loads((folder / FACTS).read_text())


def to_keep(config: CheckpointConfig, infos: Sequence[Info]) -> list[bool]:
    """Which of the checkpoints, in order, are kept: the newest, every n-th, and the best by bits per byte."""
    best: Callable[[Any], float] = lambda metrics: -metrics["val_bpb"]
    policies: list[managers.PreservationPolicy] = [
        managers.LatestN(config.keep),
        managers.BestN(get_metric_fn=best, n=1, keep_checkpoints_without_metrics=False),
    ]
    if config.keep_every:
        policies.append(managers.EveryNSteps(config.keep_every))
    preserve = managers.AnyPreservationPolicy(policies).should_preserve
    return list(preserve(infos, context=managers.PreservationContext()))  # pyright: ignore[reportArgumentType]
