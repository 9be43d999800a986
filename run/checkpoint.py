"""Saving and restoring the state with Orbax, asynchronously and sharded: python -m run.checkpoint list RUN.

checkpoints/<step>/params/     float32 parameters: all that sampling and evaluation read
checkpoints/<step>/rest/       optimizer state, skipped steps
checkpoints/<step>/facts/      step, next batch, dataset fingerprint, config, versions, a checksum of each array

On a disk Orbax writes a folder under another name and renames it when it is whole; in a bucket, where nothing can be
renamed at once, it is whole when commit_success.txt is there. Orbax does not notice flipped bits in the file of an
array, so the arrays' checksums are saved with them, and compared when they are read.
"""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec.config
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jaxtyping import Array, UInt32

from configs.schema import CheckpointConfig, UserError
from run.runtime import NoCheckpoint, highest, run_command, versions
from training.optimizer import path_name
from training.state import TrainState

COMMITTED = "commit_success.txt"


class Checkpoints:
    """The checkpoints in one folder, a run's or `checkpoint.folder`, on a disk or in a bucket (`gs://BUCKET/FOLDER`).
    Without a config they are only read, while the run may go on."""

    def __init__(self, folder: str | Path, config: CheckpointConfig | None = None, record: Sequence[Path] = ()):
        """`record`: files of the run that are copied to the folder at once and before each save. UserError where the
        folder cannot be used."""
        self.config, self.record = config, record
        self.in_bucket = str(folder).startswith("gs://")
        # Other processes, and tensorstore, write to the bucket: what was listed before does not tell what is there.
        fsspec.config.conf["gcs"] = {"use_listings_cache": False}
        try:
            self.folder = epath.Path(folder if self.in_bucket else Path(folder).resolve()) / "checkpoints"
            if config:
                self._clear()
            self.manager = self._open()
            self._copy_record()
        except Exception as error:  # of the disk or the store
            raise UserError(f"checkpoints cannot be kept in {folder}: {_first_line(error)}") from error
        self.scores: dict[int, float | None] = {}
        self.pending = False
        self.failed_saves = 0  # in a row
        self.failure = ""
        """Why the last one that failed did."""

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(read_only=self.config is None)
        return ocp.CheckpointManager(self.folder, options=options, item_names=("params", "rest", "facts"))

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, facts: dict) -> None:
        """Copies the state off the devices, and writes it while training goes on. `step` is `int(state.step)`.

        A save that fails, at once or while it is written, is counted (`failing`). Older checkpoints are deleted when
        there is a newer one that is whole.
        """
        rest = {"opt_state": state.opt_state, "skipped_steps": state.skipped_steps}
        facts = {"step": step, **facts, "time": time.time(), "versions": versions(), "shapes": _shapes(state.params)}
        facts["checksums"] = checksums({"params": state.params, **rest})
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),  # pyright: ignore[reportCallIssue]
            rest=ocp.args.StandardSave(rest),  # pyright: ignore[reportCallIssue]
            facts=ocp.args.JsonSave({**facts, "sha256": _digest(facts)}),  # pyright: ignore[reportCallIssue]
        )
        ready = self._settle() and self._try_to(self._copy_record)
        if highest(not ready) or step in self.steps():
            return

        failed_before = highest(self.failed_saves)

        def write() -> None:
            if failed_before:
                self._close()
                self._clear()  # what the one that failed has left: room for this one
                self.manager = self._open()
            self._delete_old()
            self.manager.save(step, args=items, force=True)
            self.pending = True

        self._try_to(write)

    def failing(self, wait: bool = True) -> int:
        """How many saves in a row have failed, that of the last save included: it is waited for, or, without `wait`,
        counted if it failed already. Every process must call it."""
        self._settle(wait)
        return highest(self.failed_saves)

    def _settle(self, wait: bool = True) -> bool:
        """False where the last save turns out to have failed."""
        if not self.pending or (not wait and self.manager.is_saving_in_progress()):
            return True
        self.pending = False
        finished = self._try_to(self.manager.wait_until_finished)
        self.failed_saves = 0 if finished else self.failed_saves
        return finished

    def _try_to(self, write: Callable[[], Any]) -> bool:
        """Counts a failure of the disk or the store, whatever it is: training can go on."""
        try:
            write()
        except Exception as error:
            self.failed_saves += 1
            self.failure = _first_line(error)
            return False
        return True

    def _copy_record(self) -> None:
        """Copies what a machine needs, besides the newest checkpoint, to continue a run whose folder is gone."""
        for path in self.record if jax.process_index() == 0 else ():
            if path.exists():
                copy(epath.Path(path), self.folder.parent / path.name)

    def close(self) -> None:
        """Waits until what was saved is written."""
        if not self.failing():
            self._delete_old()
        self._close()

    def _close(self) -> None:
        """Waits for all that is still being written; of a save that failed, each part raises its own error once."""
        for _ in range(4):
            with suppress(Exception):
                return self.manager.close()

    def _clear(self) -> None:
        """Deletes what a kill or a failure left half written or half deleted."""
        if jax.process_index() == 0 and self.folder.exists():
            for path in self.folder.iterdir():
                half_written = self.in_bucket and path.name.isdigit() and not (path / COMMITTED).exists()
                if half_written or path.name.endswith((".orbax-checkpoint-tmp", ".deleted")):
                    path.rmtree()

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict]:
        """The state saved at `step`, as `abstract`'s shapes and shardings say, and the facts saved with it.

        UserError where it is of another network; another exception where it is damaged.
        """
        self._require_same_network(step, abstract.params)
        rest = {"opt_state": abstract.opt_state, "skipped_steps": abstract.skipped_steps}
        found = self._restore(
            step,
            params=ocp.args.StandardRestore(abstract.params),  # pyright: ignore[reportCallIssue]
            rest=ocp.args.StandardRestore(rest),  # pyright: ignore[reportCallIssue]
        )
        _require_checksums(found.facts, {"params": found.params, **found.rest})
        step_array = jax.device_put(abstract.step.dtype.type(found.facts["step"]), abstract.step.sharding)
        state = TrainState(step_array, found.params, found.rest["opt_state"], found.rest["skipped_steps"])
        return state, found.facts

    def restore_newest(self, abstract: TrainState, say: Callable[[str], Any]) -> tuple[TrainState, dict] | None:
        """The newest state that can be read, or None where there is no checkpoint at all. Those that cannot are named,
        and put aside in bad-checkpoints/. NoCheckpoint where none can."""
        bad = []
        for step in reversed(self.steps()):
            found, problem = None, ""
            try:
                found = self.restore(step, abstract)
            except UserError:
                raise
            except Exception as error:  # whatever a damaged file makes Orbax raise
                problem = _first_line(error)
            if not highest(bool(problem)):
                self._move(bad, self.folder.parent / "bad-checkpoints")
                return found
            bad.append(step)
            say(f"checkpoint {step} cannot be read ({problem or 'by another process'}); trying the one before it")
        if bad:
            raise NoCheckpoint(f"none of the checkpoints in {self.folder} can be read; nothing was changed")
        return None

    def restore_params(self, abstract: dict) -> tuple[dict, int]:
        """The newest checkpoint's parameters alone, and their step. UserError where there is none, or it is damaged."""
        if not (steps := self.steps()):
            raise UserError(f"{self.folder} holds no checkpoint yet")
        try:
            found = self._restore(steps[-1], params=ocp.args.StandardRestore(abstract))  # pyright: ignore
            _require_checksums(found.facts, {"params": found.params})
        except Exception as error:
            raise UserError(f"checkpoint {steps[-1]} in {self.folder} cannot be read: {_first_line(error)}") from error
        return found.params, steps[-1]

    def facts(self, step: int) -> dict:
        """What was saved beside the arrays."""
        return self._restore(step).facts

    def _restore(self, step: int, **items: Any) -> Any:
        found: Any = self.manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore(), **items))
        if found.facts.pop("sha256", None) != _digest(found.facts):
            raise ValueError("facts/metadata is not what was saved")
        return found

    def _require_same_network(self, step: int, params: dict) -> None:
        saved, asked = self.facts(step)["shapes"], _shapes(params)
        if names := [name for name in sorted(saved | asked) if saved.get(name) != asked.get(name)]:
            told = "\n  ".join(f"{name}: {saved.get(name)}, not {asked.get(name)}" for name in names)
            raise UserError(f"checkpoint {step} in {self.folder} is of another network:\n  {told}")

    def _delete_old(self) -> None:
        """Keeps the newest, every n-th, and the best."""
        assert self.config
        steps, newest, every = self.steps(), self.config.keep, self.config.keep_every
        for step in set(steps) - self.scores.keys():
            try:
                self.scores[step] = self.facts(step).get("val_bpb")
            except Exception:  # a damaged one is not the best
                self.scores[step] = None
        scored = {step: score for step in steps if (score := self.scores[step]) is not None}
        best = min(scored, key=lambda step: scored[step], default=None)
        kept = {step for step in steps if step == best or (every and step % every == 0)} | {*steps[-newest:]}
        self._move([step for step in steps if step not in kept], None)

    def _move(self, steps: list[int], to: epath.Path | None) -> None:
        """Moves checkpoints into a folder, or deletes them: first they are made no checkpoints, so that none is ever
        in part."""
        if not steps:
            return
        if jax.process_index() == 0:
            for path in [self.folder / str(step) for step in steps]:
                if self.in_bucket:
                    (path / COMMITTED).unlink(missing_ok=True)
                if to:
                    to.mkdir(exist_ok=True)
                    if self.in_bucket:  # where no folder is empty
                        (to / "README").write_text("Checkpoints that could not be read.")
                    path.rename(to / f"{path.name}-{int(time.time())}")
                elif self.in_bucket:
                    path.rmtree()
                else:
                    path.rename(self.folder / f"{path.name}.deleted").rmtree()
        multihost_utils.sync_global_devices("checkpoints were moved")
        self.manager.reload()


def copy(source: epath.Path, target: epath.Path) -> None:
    """Copies a small file, whole or not at all."""
    partial = target.with_suffix(".partial")
    partial.write_bytes(source.read_bytes())
    partial.replace(target)


def checksums(tree: Any) -> dict[str, int]:
    """A number for each array [...] of elements of at most 4 bytes, the same on every mesh: the sum of its elements'
    bits, each times an odd number of its own, modulo 2^32. So no single element can change unnoticed."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_checksums([leaf for _, leaf in leaves]))
    return {path_name(path): int(total) for (path, _), total in zip(leaves, sums)}


@jax.jit
def _checksums(leaves: list[Array]) -> list[UInt32[Array, ""]]:
    def checksum(leaf: Array) -> UInt32[Array, ""]:
        position = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return [checksum(leaf) for leaf in leaves]


def _shapes(tree: Any) -> dict[str, list[int]]:
    return {path_name(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _require_checksums(facts: dict, tree: Any) -> None:
    found = checksums(tree)
    if wrong := [name for name, total in found.items() if facts["checksums"].get(name) != total]:
        raise ValueError(f"{len(wrong)} array(s) are not what was saved: {', '.join(wrong[:3])}")


def _digest(facts: dict) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        yield from _files(path) if path.is_dir() else [path]


def main() -> int:
    from run.folder import open_for_reading  # which imports this module

    if len(sys.argv) != 3 or sys.argv[1] != "list":
        raise UserError("usage: python -m run.checkpoint list RUN")
    checkpoints, abstract = open_for_reading(sys.argv[2])
    print(f"{'step':>10} {'MB':>9} {'val_bpb':>9} {'hours old':>10}")
    for step in checkpoints.steps():
        megabytes = sum(path.stat().length for path in _files(checkpoints.folder / str(step))) / 1e6
        try:
            facts = checkpoints.restore(step, abstract)[1]
            hours = (time.time() - facts["time"]) / 3600
            told = f"{facts.get('val_bpb', math.nan):9.4f} {hours:10.1f}  verified"
        except Exception as error:
            told = f"{'':9} {'':10}  DAMAGED: {_first_line(error)}"
        print(f"{step:>10} {megabytes:9.1f} {told}")
    return 0


if __name__ == "__main__":
    run_command(main)
