"""The checkpoints of a run, and how to read them. run/saver.py writes them, and run/recovery.py mends them.

Orbax does not detect flipped bits in an array's file, so checksums are saved with the arrays, and compared at each
read.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Bool, UInt32

from hosts.distributed import on_every_process, on_first_process
from run.checkpoint_files import read_arrays, read_facts
from run.folder import FACTS, RunFolder, reading
from system.errors import Damaged, NoCheckpoint, StorageLost, UserError
from system.files import causes, first_line, in_bucket, is_there, is_transient, permission_hint, with_retries
from training.optimizer import path_name
from training.shares import padded
from training.state import TrainState

CONTENT = (ValueError, LookupError, OSError)  # what Orbax, tensorstore and json raise for a damaged or missing file
FORBIDDEN = re.compile("^Forbidden|PERMISSION_DENIED")  # gcsfs, tensorstore


class Checkpoints:
    """The checkpoints in a run's folder, on a disk or in a bucket (`gs://BUCKET/RUN`), to read. The run may continue
    meanwhile."""

    def __init__(self, run: RunFolder):
        """Open a run's checkpoints. Raise UserError if they cannot be read. Every process must make one, and call its
        methods together."""
        self.run, self.folder = run, run.checkpoints
        with reading(f"the checkpoints in {run}"):
            self.steps: list[int] = on_first_process(partial(run.retried, run.finished_steps))
        """Steps of the complete checkpoints, in order; the same on every process."""

    @property
    def newest(self) -> int:
        """Return the newest complete checkpoint's step; 0 if there is none."""
        return max(self.steps, default=0)

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict]:
        """Return the state saved at `step`, padded and sharded as `abstract` is, and the facts saved with it.

        Raise the same exception on every process: UserError for another network or optimizer, Damaged if the bytes
        differ from the saved ones, StorageLost if a disk or store does not answer for long.
        """
        facts = self.facts(step)
        self._require_same_state(facts, arrays_of(abstract))
        items = self._read(step, items_of(abstract))
        step_array = jax.device_put(abstract.step.dtype.type(facts["step"]), abstract.step.sharding)
        state = TrainState(step_array, items["params"], **items["rest"])
        require_checksums(facts["checksums"], arrays_of(state), facts["shapes"])
        return state, facts

    def asked(self, step: int | None) -> int:
        """Return `step`, or the newest checkpoint's if it is None. Raise UserError if there is no such checkpoint."""
        if not self.steps:
            raise UserError(f"{self.folder} holds no checkpoint yet")
        if step is not None and step not in self.steps:
            raise UserError(f"--step={step}: {self.folder} holds {', '.join(map(str, self.steps))}")
        return self.newest if step is None else step

    def restore_params(self, abstract: dict, step: int | None = None) -> tuple[dict, int]:
        """Return the parameters that `abstract` has, from the checkpoint of `step` or from the newest, and its step.
        Raise UserError if there is no checkpoint, and NoCheckpoint, naming the others, if it is damaged."""
        step = self.asked(step)
        try:
            facts = self.facts(step)
            self._require_same_network(facts, abstract, part=True)
            items = self._read(step, {"params": abstract})
            require_checksums(facts["checksums"], items, facts["shapes"])
        except Damaged as error:
            others = ", ".join(f"--step={other}" for other in self.steps if other != step)
            raise NoCheckpoint(
                f"checkpoint {step} in {self.folder} is damaged ({first_line(error)}); the others: {others or 'none'}"
            ) from error
        return items["params"], step

    def facts(self, step: int) -> dict:
        """Return the facts saved with the arrays. Raise Damaged if they differ from the saved ones. The first process
        reads, for as long as its disk or store needs."""

        def read() -> dict:
            with _damage(self.folder / str(step)):
                facts = read_facts(self.folder / str(step))
                if facts.pop("sha256", None) != digest(facts):
                    raise Damaged("facts/metadata differs from what was saved")
            return facts

        return on_first_process(lambda: with_retries(f"checkpoint {step}", read))

    def _read(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of a checkpoint's items. Each process reads its own parts, for as long as its disk or store
        needs. Then all agree on the result."""

        def read() -> dict[str, Any]:
            with _damage(self.folder / str(step)):
                return {name: read_arrays(self.folder / str(step) / name, of) for name, of in items.items()}

        return on_every_process(f"checkpoint {step}", lambda: with_retries(f"checkpoint {step}", read))

    def _require_same_state(self, facts: dict, state: dict) -> None:
        """Raise UserError if the checkpoint's parameters have other shapes, or its optimizer other moments."""
        self._require_same_network(facts, state["params"])
        if others := sorted(facts["checksums"].keys() ^ _leaves(state).keys()):
            raise UserError(
                f"checkpoint {facts['step']} in {self.folder} was made with another optimizer: {', '.join(others[:4])}"
                f"{' and others' if len(others) > 4 else ''} are in only one of the two; give the optimizer it was "
                "made with, or start a new run from its network (--init_from)"
            )

    def _require_same_network(self, facts: dict, params: dict, part: bool = False) -> None:
        """Raise UserError if the checkpoint's parameters have other shapes. `part`: it may have more of them."""
        saved, leaves = facts["shapes"], _leaves(params)
        asked = {name: list(leaf.shape) for name, leaf in leaves.items()}
        here = {
            name: _padded(shape, leaves[name].sharding) if name in leaves else shape for name, shape in saved.items()
        }
        differ = [
            f"{name}: {saved.get(name, 'not there')}, not {asked.get(name, 'there')}"
            for name in sorted(asked if part else saved | asked)
            if here.get(name) != asked.get(name)
        ]
        if differ:
            differences = "\n  ".join(differ)
            raise UserError(f"checkpoint {facts['step']} in {self.folder} is of another network:\n  {differences}")


@jax.jit
def _all_finite(tree: Any) -> Bool[Array, ""]:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def all_finite(tree: Any) -> bool:
    """Return whether all numbers of a tree of arrays are finite. Every process must call it."""
    return bool(_all_finite(tree))


@contextmanager
def _damage(checkpoint: epath.Path) -> Iterator[None]:
    """Turn errors of a file's content into Damaged, or StorageLost if the checkpoint is gone. Others are a disk's that
    may pass, or our own."""
    try:
        yield
    except Exception as error:
        of_content = any(isinstance(cause, CONTENT) for cause in causes(error))  # Orbax raises a plain Exception
        if not of_content or is_transient(error) or isinstance(error, PermissionError):
            raise
        if FORBIDDEN.search(str(error)):
            raise UserError(f"a checkpoint may not be read: {first_line(error)}{permission_hint(error)}") from error
        if not is_there(checkpoint / FACTS if in_bucket(checkpoint) else checkpoint):
            raise StorageLost(f"{checkpoint} was deleted while it was read") from error
        raise Damaged(first_line(causes(error)[-1])) from error  # Orbax's message names no array


def arrays_of(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint has checksums of."""
    return {name: part for name, part in state._asdict().items() if name != "step"}


def items_of(state: TrainState) -> dict[str, Any]:
    """Return the folders of a checkpoint with the state's arrays."""
    rest = {"opt_state": state.opt_state, "skipped_steps": state.skipped_steps}
    return {"params": state.params, "rest": rest}


def _leaves(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _padded(shape: list[int], sharding: jax.sharding.NamedSharding) -> list[int]:
    """Return the shape in which a mesh stores an array (`training.shares.ShardLayout`)."""
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [(names,) if isinstance(names, str) else names or () for names in spec]
    return [padded(size, math.prod(sharding.mesh.shape[name] for name in names)) for size, names in zip(shape, axes)]


def checksums(tree: Any, shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> dict[str, int]:
    """Return a number for each array [...] of elements of at most 4 bytes, the same on every mesh: the sum of its
    elements' bits, each multiplied by its own odd number, modulo 2^32. So it detects a change of any single element.

    `shapes` are the parameters' without the mesh's padding, whose zeros add nothing. A moment has its parameter's
    shape.
    """
    leaves = _leaves(tree)
    of = {name: tuple(shape) for name, shape in shapes.items()}

    def shape_of(name: str, leaf: Array) -> tuple[int, ...]:
        """Return a parameter's or moment's shape. A moment's name ends with its parameter's."""
        ends = (name[i:] for i in range(len(name)) if i == 0 or name[i - 1] == ".")
        return next((of[end] for end in ends if end in of), leaf.shape)

    unpadded = [shape_of(name, leaf) for name, leaf in leaves.items()]
    sums = jax.device_get(_checksums(list(leaves.values()), tuple(unpadded)))
    return dict(zip(leaves, map(int, sums)))


@partial(jax.jit, static_argnums=1)
def _checksums(leaves: list[Array], shapes: tuple[tuple[int, ...], ...]) -> list[UInt32[Array, ""]]:
    def checksum(leaf: Array, shape: tuple[int, ...]) -> UInt32[Array, ""]:
        position = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(shape if leaf.ndim else ()):
            # A moment may have summed a dimension to one number.
            size = min(size, leaf.shape[axis])
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        return jnp.sum(bits * (2 * position + 1), dtype=jnp.uint32)

    return [checksum(leaf, shape) for leaf, shape in zip(leaves, shapes)]


def require_checksums(saved: dict[str, int], tree: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise Damaged, with the arrays' names, if a tree's checksums differ from the saved ones."""
    if wrong := [name for name, total in checksums(tree, shapes).items() if saved.get(name) != total]:
        raise Damaged(f"{len(wrong)} array(s) differ from what was saved: {', '.join(wrong[:3])}")


def digest(facts: dict) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
