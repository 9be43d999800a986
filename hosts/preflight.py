"""Check, before anything is compiled, that the hosts of a run can train together. Messages name the host.

The hosts exchange facts through JAX's coordination service, so a device that does not answer cannot block it. Then all
devices compute one sum with a known result.
"""

import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.files import in_bucket, shown_bytes
from configs.retry import first_line, is_transient, permission_hint, with_retries
from configs.schema import Config, UserError
from hosts.distributed import exchange, on_first_process
from hosts.runtime import TrainingAborted, versions
from hosts.stop import limited_to
from model.gpt import parameter_counts

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "data", "evaluation", "hosts", "interchange", "model", "reinforcement", "run", "training")
SUM_SECONDS = 180  # for the sum, with the connection of all devices
VISIBLE_SECONDS = 90  # for a shared folder to show what another host made: NFS caches a missing file for 60


class Host(NamedTuple):
    """Describe a host, as JSON can."""

    name: str
    same: dict[str, str]
    """Values that must be the same on all, by name."""
    problems: list[str]


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the Python files that a run may import: their names and bytes."""
    digest = hashlib.sha256()
    files = [*root.glob("*.py"), *(path for room in ROOMS for path in root.glob(f"{room}/**/*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compare(hosts: Sequence[Host]) -> list[str]:
    """Return a line for each problem, with its host. Most hosts' value counts as right; of two, the first's."""
    names = [f"process {i} ({host.name})" for i, host in enumerate(hosts)]
    wrong = [f"{name}: {problem}" for name, host in zip(names, hosts) for problem in host.problems]
    for what in hosts[0].same:
        values = [host.same.get(what, "nothing") for host in hosts]
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        unlike = [(name, value) for name, value in zip(names, values) if value != usual]
        wrong += [f"{name} has {what} {value}, the others {usual}" for name, value in unlike[:8]]
        wrong += [f"and {len(unlike) - 8} other processes differ in {what}"] * (len(unlike) > 8)
    return wrong


def problems_here(config: Config) -> list[str]:
    """Return the problems of this host with the run's folder. Every process must call it."""
    shared = config.run_dir
    if in_bucket(shared):
        return on_first_process(lambda: with_retries(shared, lambda: refusals(epath.Path(shared))))
    folder, until = Path(shared).absolute(), time.monotonic() + VISIBLE_SECONDS
    made = on_first_process(folder.is_dir)
    while made and not folder.is_dir():
        if time.monotonic() > until:
            return [f"does not see {shared} of process 0: all hosts must share it"]
        time.sleep(1)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    writable = there.is_dir() and os.access(there, os.W_OK)
    return [] if writable else [f"cannot write to {there}"]


def require_room(config: Config) -> None:
    """Raise TrainingAborted on all processes if the disk of the run's folder has no room for one more checkpoint: no
    option is wrong, and training would be lost. Every process must call it."""
    if in_bucket(config.run_dir):
        return
    folder = Path(config.run_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    checkpoint = 4 * 3 * sum(parameter_counts(config.model).values())  # float32 parameters and two moments
    if (free := on_first_process(lambda: shutil.disk_usage(there).free)) < checkpoint:
        needed = f"a checkpoint takes {shown_bytes(checkpoint)}"
        raise TrainingAborted(f"{shown_bytes(free)} are free at {there}; {needed}: make room, and start again")


def refusals(bucket: epath.Path) -> list[str]:
    """Write a file to a run's folder in a bucket, overwrite it as tensorstore does, and delete it. Return what the
    bucket refuses."""
    probe = bucket / ".preflight-0"
    try:
        for text in ("written by the preflight", "overwritten"):
            probe.write_text(text)
        probe.unlink()
    except Exception as error:
        if is_transient(error):
            raise
        return [f"cannot write to {bucket}: {first_line(error)}{permission_hint(error)}"]
    return []


def preflight(config: Config, mesh: Mesh, fingerprint: str, tokenizer: str) -> list[Host]:
    """Return every host if all can train together; else raise the same UserError on all. Every process must call
    it."""
    devices = jax.local_devices()
    same = {"code": code_digest(), **versions(), "data": fingerprint[:12], "tokenizer": tokenizer[:12]}
    same["devices"] = f"{len(devices)} x {devices[0].device_kind}"
    problems = problems_here(config)
    mine = Host(platform.node(), same, problems)
    hosts = [Host(*json.loads(answer)) for answer in exchange("the preflight's answer", json.dumps(mine))]
    if wrong := compare(hosts):
        raise UserError("the hosts of this run cannot train together:\n  " + "\n  ".join(wrong))
    require_right_sum(mesh)
    return hosts


def require_right_sum(mesh: Mesh) -> None:
    """Compute one sum over all devices with a known result. Raise UserError if it differs; end this process with code
    42 if it does not finish."""
    numbers = np.arange(1, mesh.size + 1, dtype=np.int32)
    at = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    placed = jax.make_array_from_callback(numbers.shape, at, lambda index: numbers[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    with limited_to(SUM_SECONDS, f"the sum over all devices takes longer than {SUM_SECONDS} s"):
        result = int(total(placed).addressable_data(0))
    expected = int(numbers.sum())
    sums = exchange("the sum over all devices", str(result))
    if wrong := [f"process {i} found {sum_}" for i, sum_ in enumerate(sums) if sum_ != str(expected)]:
        raise UserError(
            f"the sum over all devices is {expected}, but {', '.join(wrong[:8])}: a device or link is broken"
        )
