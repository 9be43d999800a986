"""All calls of Orbax. The names below are the only parts of its layout on disk that this project relies on.

Orbax's managers use barriers: a process that cannot read or write leaves the others waiting for twenty minutes. So this
module uses Orbax's handlers, which do not wait. The processes agree through JAX's coordination service.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from configs.retry import described
from configs.schema import CheckpointConfig
from hosts.peers import exchange

COMMITTED = "commit_success.txt"  # in a bucket: written last
FACTS = "facts/metadata"  # a JSON file; on a disk the folder is renamed when it is complete
HALF_DONE = ".orbax-checkpoint-tmp"  # suffix of a folder that is being written


class Info(NamedTuple):
    """A checkpoint for the preservation policies."""

    step: int
    metrics: dict[str, float] | None
    """`val_bpb`, if evaluated."""
    time: datetime | None = None


def unfinished(folder: epath.Path) -> epath.Path:
    """Return the folder that a checkpoint is written to: in a bucket, which cannot rename, its final one."""
    return folder if str(folder).startswith("gs://") else folder.with_name(folder.name + HALF_DONE)


def make_room(folder: epath.Path) -> None:
    """Make the empty folder for writing a checkpoint. On the first process."""
    target = unfinished(folder)
    if target.exists():
        target.rmtree()
    (target / FACTS).parent.mkdir(parents=True)


def _writer() -> ocp.PyTreeCheckpointHandler:
    """Write arrays, each process its own parts. Write no metadata of arrays: the other processes would wait until the
    first has made their folder."""
    arrays = (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=ocp.type_handlers.create_type_handler_registry(arrays))


class Saving(threading.Thread):
    """Writes a checkpoint in the background: each process its parts, then the first process completes it."""

    def __init__(self, folder: epath.Path, items: dict[str, Any], facts: dict):
        """Copy the arrays off the devices. `make_room` must have been called for the folder."""
        super().__init__(name=f"saving {folder.name}")
        self.folder, self.facts = folder, facts
        self.handlers = {name: _writer() for name in items}
        self.parts: list[Any] = []
        self.failure = "0 it was not finished"
        """Why it failed (`configs.retry.described`), the same on every process; empty once the checkpoint is
        complete."""

        async def begin() -> None:
            for name, handler in self.handlers.items():
                save = ocp.args.PyTreeSave(items[name])  # pyright: ignore[reportCallIssue]
                self.parts += await handler.async_save(unfinished(folder) / name, args=save) or []

        # Not asyncio.run, which counts the tasks of all threads while Orbax's add theirs.
        with closing(asyncio.new_event_loop()) as loop:
            self.failed = _failure(lambda: loop.run_until_complete(begin()))
        self.start()

    def run(self) -> None:
        for part in self.parts:  # all of them, so that nothing is written after a failure
            self.failed = _failure(part.result) or self.failed
        self.parts.clear()  # they keep the arrays' copies
        failures = exchange("parts of a checkpoint", self.failed, channel="saving")
        failed = next((f"{failure} (process {i})" for i, failure in enumerate(failures) if failure), "")
        if not failed and jax.process_index() == 0:
            failed = _failure(self._make_whole)
        self.failure = exchange("the end of a checkpoint", failed, channel="saving")[0]

    def _make_whole(self) -> None:
        target = unfinished(self.folder)
        for name, handler in self.handlers.items():
            handler.finalize(target / name)
        (target / FACTS).write_text(json.dumps(self.facts))
        if target == self.folder:
            (target / COMMITTED).write_text("")
        else:
            target.rename(self.folder)


def _failure(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return described(error)
    return ""


def read_arrays(folder: epath.Path, abstract: Any) -> Any:
    """Return this process's parts of the arrays in an item's folder, padded and sharded as `abstract`, which may have
    only some of them. Wait for no other process."""
    # Not strict: another mesh may have saved the arrays with other padding.
    arguments = ocp.checkpoint_utils.construct_restore_args(abstract, strict=False)
    restore = ocp.args.PyTreeRestore(abstract, arguments, partial_restore=True)  # pyright: ignore[reportCallIssue]
    return ocp.PyTreeCheckpointHandler().restore(folder, args=restore)


def read_facts(folder: epath.Path) -> dict:
    """Return the JSON in a checkpoint's folder."""
    return json.loads((folder / FACTS).read_text())


def to_keep(config: CheckpointConfig, infos: Sequence[Info]) -> list[bool]:
    """Return, for each checkpoint in order, whether to keep it: the newest, every n-th, and the best by bits per
    byte."""
    best: Callable[[Any], float] = lambda metrics: -metrics["val_bpb"]
    policies: list[managers.PreservationPolicy] = [
        managers.LatestN(config.keep),
        managers.BestN(get_metric_fn=best, n=1, keep_checkpoints_without_metrics=False),
    ]
    if config.keep_every:
        policies.append(managers.EveryNSteps(config.keep_every))
    preserve = managers.AnyPreservationPolicy(policies).should_preserve
    return list(preserve(infos, context=managers.PreservationContext()))  # pyright: ignore[reportArgumentType]
