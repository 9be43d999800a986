"""The files of a checkpoint: how Orbax writes and reads its arrays, and when it is complete.

checkpoints/<step>/params/     float32 parameters: sampling and evaluation read only these
checkpoints/<step>/rest/       optimizer state, skipped steps
checkpoints/<step>/facts/      step, tokens, position in the data, config, versions, a checksum of each array

A checkpoint is complete if it has its facts, which are written last and deleted first. On a disk its folder has another
name until then, and is renamed. A bucket has no names to change: there the folder has an object `unfinished`.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.serialization import tensorstore_utils

from hosts.distributed import exchange
from run.folder import FACTS, RunFolder
from system.files import FULL, described, first_line, in_bucket
from system.messages import LOGGER

HALF_DONE = ".orbax-checkpoint-tmp"  # suffix of a folder that is being written
DELETED = ".deleted"  # suffix of a folder that is being deleted
UNFINISHED = "unfinished"  # object in a folder of a bucket that is being written, or deleted
T = TypeVar("T")

# Orbax logs how many bytes TensorStore has written. TensorStore 0.1.86 never frees these answers, 76 KB a save.
tensorstore_utils.get_tensorstore_raw_bytes = lambda direction: None


def outside_event_loop(function: Callable[[], T]) -> T:
    """Return the result of `function`, which runs an event loop, as Orbax does: from a thread if this one already has a
    loop, as in a notebook's cell (orbax issue 481)."""
    try:
        asyncio.get_running_loop()
        in_loop = True
    except RuntimeError:
        in_loop = False
    if not in_loop:  # called above, `function` would have that error as the cause of its own
        return function()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def read_arrays(folder: epath.Path, abstract: Any) -> Any:
    """Return this process's parts of the arrays in an item's folder, padded and sharded as `abstract`, which may have
    only some of them. Wait for no other process."""
    # Not strict: another mesh may have saved the arrays with other padding.
    arguments = ocp.checkpoint_utils.construct_restore_args(abstract, strict=False)
    restore = ocp.args.PyTreeRestore(abstract, arguments, partial_restore=True)  # pyright: ignore[reportCallIssue]
    return outside_event_loop(lambda: ocp.PyTreeCheckpointHandler().restore(folder, args=restore))


def read_facts(folder: epath.Path) -> dict:
    """Return the JSON in a checkpoint's folder."""
    return json.loads((folder / FACTS).read_text())


def delete(folder: epath.Path, steps: Sequence[int]) -> None:
    """Delete the checkpoints of these steps. On a disk they are renamed first; in a bucket their facts go first. So no
    partial checkpoint counts as complete. One that cannot be deleted stays, and does not block the next ones."""
    for path in [folder / str(step) for step in steps]:
        try:
            if in_bucket(folder):
                mark_unfinished(path)
                (path / FACTS).unlink()
                path.rmtree()
            else:
                path.rename(folder / f"{path.name}{DELETED}").rmtree()
        except Exception as error:
            LOGGER.warning(f"checkpoint {path.name} could not be deleted: {first_line(error)}")


def unfinished(folder: epath.Path) -> epath.Path:
    """Return the folder that a checkpoint is written to: in a bucket, which cannot rename, its final one."""
    return folder if in_bucket(folder) else folder.with_name(folder.name + HALF_DONE)


def mark_unfinished(folder: epath.Path) -> None:
    """Mark a folder in a bucket as one that is being written, or deleted. A copy of a checkpoint has no such mark."""
    (folder / UNFINISHED).write_text("This checkpoint is being written, or deleted.")


def sync(folder: Path) -> None:
    """Write all files below a folder, and their names, to the disk: a rename alone would outlive a power cut without
    them."""
    for parent, _, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Saving(threading.Thread):
    """Writes a checkpoint in the background: each process its parts, then the first process completes it, and deletes
    old ones: a slow store delays no step."""

    def __init__(self, of: RunFolder, folder: epath.Path, items: dict[str, Any], facts: dict, old: Sequence[int]):
        """Copy the arrays off the devices. The folder `unfinished` must be empty. `old`: the steps to delete."""
        super().__init__(name=f"saving {folder.name}")
        self.run_folder, self.folder, self.facts, self.old = of, folder, facts, old
        # Without metadata of arrays: the other processes would wait until the first has made their folder.
        arrays = (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
        registry = ocp.type_handlers.create_type_handler_registry(arrays)
        self.handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in items}
        self.parts: list[Any] = []
        self.failure = "0 it was not finished"
        """Why it failed (`system.files.described`), the same on every process; empty once the checkpoint is
        complete."""

        async def begin() -> None:
            for name, handler in self.handlers.items():
                save = ocp.args.PyTreeSave(items[name])  # pyright: ignore[reportCallIssue]
                self.parts += await handler.async_save(unfinished(folder) / name, args=save) or []

        def run() -> None:
            # Not asyncio.run, which counts the tasks of all threads while Orbax's add theirs.
            with closing(asyncio.new_event_loop()) as loop:
                loop.run_until_complete(begin())

        self.own_failure = failure_of(lambda: outside_event_loop(run))
        self.start()

    def run(self) -> None:
        # All parts, so that nothing is written after a failure.
        own_failure = explaining([self.own_failure, *(failure_of(part.result) for part in self.parts)])
        self.parts.clear()  # they keep the arrays' copies
        failures = exchange("parts of a checkpoint", own_failure, channel="saving")
        failed = explaining([f"{failure} (process {i})" for i, failure in enumerate(failures) if failure])
        if not failed and jax.process_index() == 0:
            failed = failure_of(self.run_folder.upload) or failure_of(self._complete)
        self.failure = exchange("the end of a checkpoint", failed, channel="saving")[0]
        if not self.failure and jax.process_index() == 0:
            delete(self.folder.parent, self.old)

    def _complete(self) -> None:
        target = unfinished(self.folder)
        for name, handler in self.handlers.items():
            handler.finalize(target / name)
        (target / FACTS).write_text(json.dumps(self.facts))
        if target == self.folder:
            (target / UNFINISHED).unlink()
        else:
            sync(Path(target))
            target.rename(self.folder)
            sync_folder(Path(target.parent))


def explaining(failures: Sequence[str]) -> str:
    """Return the failure that explains the others, which may miss what it could not write: a full disk, or else the
    first. Return an empty text without any."""
    failed = [failure for failure in failures if failure]
    return next((failure for failure in failed if FULL in failure), failed[0] if failed else "")


def failure_of(function: Callable[[], Any]) -> str:
    """Call `function`, and return how it failed, as `system.files.described` does; empty if it did not."""
    try:
        function()
    except Exception as error:
        return described(error)
    return ""
