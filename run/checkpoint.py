"""Saving and restoring the state with Orbax, asynchronously and sharded.

checkpoints/<step>/params/     float32 parameters: sampling and evaluation read only these, or their average
checkpoints/<step>/average/    their average, if the run has one (`optimizer.average`): read in their place
checkpoints/<step>/rest/       optimizer state, skipped steps
checkpoints/<step>/facts/      step, tokens, position in the data, config, versions, a checksum of each array

On a disk Orbax writes a folder under another name and renames it when it is complete. A bucket has no atomic rename: a
folder is complete when commit_success.txt exists. Orbax does not detect flipped bits in an array's file, so checksums
are saved with the arrays, and compared at each read.

Orbax's preservation policies choose which checkpoints to keep. This module deletes the others. Orbax would delete in
place: a kill would leave a part of a checkpoint under a checkpoint's name. A failed deletion (a bucket may forbid it)
would fail the save before it.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from etils import epath

from configs import retry
from configs.messages import LOGGER
from configs.retry import StorageLost, causes, described, first_line, passes, patiently, role
from configs.schema import CheckpointConfig, UserError
from hosts.runtime import Damaged, NoCheckpoint, highest, on_every_process, on_first_process, versions
from run import orbax_calls
from run.checksums import checksums, digest, require_checksums
from run.orbax_calls import COMMITTED, FACTS, HALF_DONE, Info, Saving
from run.record import Record, place
from training.layout import padded
from training.optimizer import path_name
from training.state import TrainState

LEFT_OVER = (HALF_DONE, ".deleted")
AVERAGE = "average."  # beginning of its arrays' names
FORBIDDEN = re.compile("^Forbidden|PERMISSION_DENIED")  # gcsfs, tensorstore


def is_there(path: epath.Path) -> bool:
    """Return whether a file or folder exists. Raise OSError if the disk does not answer; `exists` would return
    False."""
    if str(path).startswith("gs://"):
        return path.exists()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def whole_steps(folder: epath.Path) -> list[int]:
    """Return the steps of the complete checkpoints in a `checkpoints` folder, in order."""
    if not is_there(folder):
        return []
    last_written = COMMITTED if str(folder).startswith("gs://") else FACTS
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and is_there(path / last_written))


class Checkpoints:
    """The checkpoints in one folder, a run's or `checkpoint.folder`, on a disk or in a bucket (`gs://BUCKET/FOLDER`).
    Without a config they are only read, and the run may continue meanwhile."""

    def __init__(
        self,
        folder: str | Path,
        config: CheckpointConfig | None = None,
        record: Record | None = None,
        on_saved: Callable[[int], None] = lambda step: None,
        scores: Mapping[int, float] = MappingProxyType({}),
    ):
        """Open the folder. `record` is copied before each save. `on_saved` is called on the first process with the step
        of each completed checkpoint. `scores`: `val_bpb` of steps, on the first process. Raise UserError if the folder
        cannot be used. Every process must make one, and call its methods together."""
        self.config, self.record, self.on_saved, self.scores = config, record, on_saved, scores
        self.in_bucket = str(folder).startswith("gs://")
        self.folder = place(folder) / "checkpoints"
        self.not_whole: list[str] = []
        """Names that looked like checkpoints, were not, and were put aside."""
        where = str(self.folder)
        try:
            if config:
                self.not_whole = on_first_process(lambda: patiently(where, self._clear))
            self.infos = [Info(*info) for info in on_first_process(lambda: patiently(where, self._look))]
            """Steps of the complete checkpoints, in order; the same on every process."""
        except (UserError, StorageLost):
            raise
        except Exception as error:  # from the disk or the store
            raise UserError(f"checkpoints cannot be kept in {folder}: {first_line(error)}{role(error)}") from error
        self.pending: Info | None = None
        """The save in progress."""
        self.failed_saves = 0
        """Number of consecutive failed saves; the same on every process."""
        self.failure, self.passing, self.failing_since = "", False, 0.0
        """Why the last save failed, whether that may pass by itself, and when saves began to fail."""

    @property
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        return [info.step for info in self.infos]

    @property
    def newest(self) -> int:
        """Return the newest complete checkpoint's step; 0 if there is none."""
        return max(self.steps, default=0)

    def _look(self) -> list[Info]:
        """Return the state of the folder. On the first process."""
        return [Info(step, _metrics(self.scores.get(step))) for step in whole_steps(self.folder)]

    def save(self, step: int, state: TrainState, facts: dict) -> None:
        """Copy the state off the devices, and write it while training continues. `step` is `int(state.step)`; `facts`
        holds the parameters' `shapes` without padding (`model.shapes.parameter_shapes`).

        A save that fails, at once or in the background, is counted (`failing`). Older checkpoints are deleted once a
        newer one is complete.
        """
        facts = {"step": step, **facts, "time": time.time(), "versions": versions()}
        facts["checksums"] = checksums(_arrays(state), facts["shapes"])
        facts["sha256"] = digest(facts)
        self._settle()
        if step in self.steps:
            return
        target = self.folder / str(step)

        def begin() -> str:
            try:
                if self.record:
                    self.record.copy()
                orbax_calls.make_room(target)
            except Exception as error:
                return described(error)
            return ""

        if failure := on_first_process(begin):
            self._failed(failure)
        else:
            self.saving = Saving(target, _items(state), facts)
            self.pending = Info(step, None)

    def score(self, step: int, val_bpb: float) -> None:
        """Note the bits per byte of a checkpoint, saved or in progress. The best is kept. The run's metrics record
        it."""
        if self.pending and self.pending.step == step:
            self.pending = Info(step, _metrics(val_bpb))
        self.infos = [Info(step, _metrics(val_bpb)) if info.step == step else info for info in self.infos]

    def failing(self, wait: bool = True) -> int:
        """Return the number of consecutive failed saves, the last one included. With `wait`, wait for its end;
        otherwise count it if it failed already."""
        self._settle(wait)
        return self.failed_saves

    def _settle(self, wait: bool = True) -> None:
        """Check the result of the last save. After a success, delete old checkpoints."""
        if not self.pending or (not wait and highest(self.saving.is_alive())):
            return
        saved, self.pending = self.pending, None
        self.saving.join()
        if self.saving.failure:
            self._failed(self.saving.failure)
            return
        if self.failed_saves:
            on_first_process(self._try_to_clear)
        self.failed_saves = 0
        self.infos.append(saved)
        if jax.process_index() == 0:
            with suppress(OSError):  # the run's own disk is full; the checkpoint is complete all the same
                self.on_saved(saved.step)
        self._delete_old()

    def _failed(self, failure: str) -> None:
        """Count a failed save, and remove what it left, to free the disk: training continues. Raise StorageLost if the
        disk or the store has not answered for `configs.retry.SECONDS`."""
        self.failing_since = self.failing_since if self.failed_saves else time.monotonic()
        self.failed_saves += 1
        self.passing, self.failure = failure[0] == "1", failure[2:]
        LOGGER.warning(f"{self.failed_saves} save(s) in a row failed: {self.failure}; trying again")
        on_first_process(self._try_to_clear)
        if self.passing and highest(time.monotonic() - self.failing_since > retry.SECONDS):
            raise StorageLost(f"saving in {self.folder}: {self.failure}")

    def _try_to_clear(self) -> None:
        with suppress(Exception):  # the disk does not answer; the next successful save repeats this
            self._clear()

    def close(self) -> None:
        """Wait until the last save is written. Complete the deletions of an earlier start that was killed."""
        self._settle()
        if self.config:
            self._delete_old()

    def _clear(self) -> list[str]:
        """Delete what a kill or a failure left half written or half deleted. Put aside what has a checkpoint's name but
        is not one, and return these names. On the first process."""
        put_aside = []
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
        for path in self.folder.iterdir() if self.folder.exists() else ():  # a bucket has no empty folders
            half_written = self.in_bucket and path.name.isdigit() and not (path / COMMITTED).exists()
            if half_written or path.name.endswith(LEFT_OVER):
                path.rmtree()
            elif path.name.isdigit() and not self.in_bucket and not is_there(path / FACTS):
                self._put_aside(path)
                put_aside.append(path.name)
        return put_aside

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict]:
        """Return the state saved at `step`, padded and sharded as `abstract` is, and the facts saved with it. The state
        has an average if both have one.

        Raise the same exception on every process: UserError for another network or optimizer, Damaged if the bytes
        differ from the saved ones, StorageLost if a disk or store does not answer for long.
        """
        facts = self._facts_for_all(step)
        self._require_same_state(facts, _arrays(abstract))
        asked = abstract if _has_average(facts) else abstract._replace(average=None)
        items = self._read(step, _items(asked))
        step_array = jax.device_put(abstract.step.dtype.type(facts["step"]), abstract.step.sharding)
        state = TrainState(step_array, items["params"], **items["rest"], average=items.get("average"))
        require_checksums(facts["checksums"], _arrays(state), facts["shapes"])
        return state, facts

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict] | None:
        """Return the newest state that can be read, or None without any checkpoint. Report damaged ones, and move them
        to bad-checkpoints/. Raise NoCheckpoint if all are damaged, and StorageLost if a disk or store does not answer,
        which does not mean damage."""
        for name in self.not_whole:
            LOGGER.warning(f"checkpoint {name} cannot be read (it is incomplete); it is in bad-checkpoints")
        bad = []
        for step in reversed(self.steps):
            try:
                restored = self.restore(step, abstract)
            except Damaged as error:
                bad.append(step)
                LOGGER.warning(f"checkpoint {step} cannot be read ({first_line(error)}); trying the one before it")
                continue
            if bad:
                self._forget(bad)
                on_first_process(lambda: [self._put_aside(self.folder / str(step)) for step in bad])
            return restored
        if bad:
            raise NoCheckpoint(f"none of the checkpoints in {self.folder} can be read; nothing was changed")
        return None

    def asked(self, step: int | None) -> int:
        """Return `step`, or the newest checkpoint's if it is None. Raise UserError if there is no such checkpoint."""
        if not self.steps:
            raise UserError(f"{self.folder} holds no checkpoint yet")
        if step is not None and step not in self.steps:
            raise UserError(f"--step={step}: {self.folder} holds {', '.join(map(str, self.steps))}")
        return self.newest if step is None else step

    def restore_params(self, abstract: dict, step: int | None = None, average: bool = True) -> tuple[dict, int, bool]:
        """Return the parameters that `abstract` has, from the checkpoint of `step` or from the newest, its step, and
        whether they are their average: so if it has one and it is asked for. Raise UserError if there is no checkpoint,
        and NoCheckpoint, naming a sound one, if it is damaged."""
        step = self.asked(step)
        try:
            return self._params(step, abstract, average)
        except Damaged as error:
            why = f"checkpoint {step} in {self.folder} is damaged ({first_line(error)})"
        for other in [other for other in reversed(self.steps) if other != step]:
            with suppress(Damaged):
                self._params(other, abstract, average)
                raise NoCheckpoint(f"{why}; {other} is sound: --step={other}")
        raise NoCheckpoint(f"{why}, and there is no sound one")

    def _params(self, step: int, abstract: dict, average: bool) -> tuple[dict, int, bool]:
        facts = self._facts_for_all(step)
        self._require_same_network(facts, abstract, part=True)
        name = "average" if average and _has_average(facts) else "params"
        items = self._read(step, {name: abstract})
        require_checksums(facts["checksums"], items, facts["shapes"])
        return items[name], step, name == "average"

    def facts(self, step: int) -> dict:
        """Return the facts saved with the arrays. Raise Damaged if they differ from the saved ones."""
        with _damage():
            facts = orbax_calls.read_facts(self.folder / str(step))
            if facts.pop("sha256", None) != digest(facts):
                raise Damaged("facts/metadata differs from what was saved")
        return facts

    def _facts_for_all(self, step: int) -> dict:
        """Read on the first process, for as long as its disk or store needs."""
        return on_first_process(lambda: patiently(f"checkpoint {step}", lambda: self.facts(step)))

    def _read(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of a checkpoint's items. Each process reads its own parts, for as long as its disk or store
        needs. Then all agree on the result."""

        def read() -> dict[str, Any]:
            with _damage():
                return {name: orbax_calls.read_arrays(self.folder / str(step) / name, of) for name, of in items.items()}

        return on_every_process(f"checkpoint {step}", lambda: patiently(f"checkpoint {step}", read))

    def _require_same_state(self, facts: dict, state: dict) -> None:
        """Raise UserError if the checkpoint's parameters have other shapes, or its optimizer other moments."""
        self._require_same_network(facts, state["params"])
        differ = facts["checksums"].keys() ^ _leaves(state).keys()
        if others := sorted(name for name in differ if not name.startswith(AVERAGE)):
            raise UserError(
                f"checkpoint {facts['step']} in {self.folder} was made with another optimizer: {', '.join(others[:4])}"
                f"{' and others' if len(others) > 4 else ''} are in only one of the two; give the optimizer it was "
                "made with, or start a new run from its network (export.py, then --init_from)"
            )

    def _require_same_network(self, facts: dict, params: dict, part: bool = False) -> None:
        """Raise UserError if the checkpoint's parameters have other shapes. `part`: it may have more of them."""
        saved, leaves = facts["shapes"], _leaves(params)
        asked = {name: list(leaf.shape) for name, leaf in leaves.items()}
        in_place = lambda name, shape: _padded(shape, leaves[name].sharding) if name in leaves else shape
        here = {name: in_place(name, shape) for name, shape in saved.items()}
        differ = [
            f"{name}: {saved.get(name, 'not there')}, not {asked.get(name, 'there')}"
            for name in sorted(asked if part else saved | asked)
            if here.get(name) != asked.get(name)
        ]
        if differ:
            differences = "\n  ".join(differ)
            raise UserError(f"checkpoint {facts['step']} in {self.folder} is of another network:\n  {differences}")

    def _delete_old(self) -> None:
        """Keep the newest, every n-th, and the best by bits per byte. The others are renamed before they are deleted,
        so no partial checkpoint has a checkpoint's name. One that cannot be deleted stays, and does not block the next
        ones."""
        assert self.config
        keep = orbax_calls.to_keep(self.config, self.infos)
        old = [info.step for info, kept in zip(self.infos, keep) if not kept]
        if not old:
            return
        self._forget(old)
        for path in [self.folder / str(step) for step in old] if jax.process_index() == 0 else ():
            try:
                if self.in_bucket:
                    (path / COMMITTED).unlink(missing_ok=True)
                    path.rmtree()
                else:
                    path.rename(self.folder / f"{path.name}.deleted").rmtree()
            except Exception as error:
                LOGGER.warning(f"checkpoint {path.name} could not be deleted: {first_line(error)}")

    def _put_aside(self, path: epath.Path) -> None:
        """Move an unreadable checkpoint to bad-checkpoints/, on the first process."""
        target = self.folder.parent / "bad-checkpoints"
        target.mkdir(exist_ok=True)
        if self.in_bucket:
            (path / COMMITTED).unlink(missing_ok=True)
            (target / "README").write_text("Checkpoints that could not be read.")  # a bucket has no empty folders
        path.rename(target / f"{path.name}-{int(time.time())}")

    def _forget(self, steps: list[int]) -> None:
        self.infos = [info for info in self.infos if info.step not in steps]


@contextmanager
def _damage() -> Iterator[None]:
    """Turn errors of reading a checkpoint into Damaged, except those of the disk, store or memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if passes(error) or isinstance(error, PermissionError):
            raise
        if FORBIDDEN.search(str(error)):
            raise UserError(f"a checkpoint may not be read: {first_line(error)}{role(error)}") from error
        raise Damaged(first_line(causes(error)[-1])) from error  # Orbax's message names no array


def _metrics(val_bpb: float | None) -> dict[str, float] | None:
    """Return the score for the policies. NaN is not a score: it would be the best."""
    return None if val_bpb is None or not math.isfinite(val_bpb) else {"val_bpb": val_bpb}


def _arrays(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint has checksums of."""
    return {name: part for name, part in state._asdict().items() if name != "step"}


def _items(state: TrainState) -> dict[str, Any]:
    """Return the folders of a checkpoint with the state's arrays."""
    rest = {"opt_state": state.opt_state, "skipped_steps": state.skipped_steps}
    return {"params": state.params, "rest": rest} | ({"average": state.average} if state.average else {})


def _has_average(facts: dict) -> bool:
    return any(name.startswith(AVERAGE) for name in facts["checksums"])


def _leaves(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _padded(shape: list[int], sharding: jax.sharding.NamedSharding) -> list[int]:
    """Return the shape in which a mesh stores an array (`training.layout.Place`)."""
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [(names,) if isinstance(names, str) else names or () for names in spec]
    return [padded(size, math.prod(sharding.mesh.shape[name] for name in names)) for size, names in zip(shape, axes)]
