"""Check, before anything is compiled, that the hosts of a run can train together. Messages name the host.

The hosts exchange facts through JAX's coordination service, so a device that does not answer cannot block it. Then all
devices compute one sum with a known result. A host that does not answer in time ends the start.
"""

import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hosts.distributed import exchange, on_every_process, on_first_process
from hosts.runtime import code_digest, versions
from hosts.watchdog import time_limit
from model.gpt import parameter_counts
from options.schema import Config
from system.errors import TrainingAborted, UserError
from system.files import RETRY_SECONDS, first_line, in_bucket, is_there, is_transient, permission_hint, with_retries

ANSWER_SECONDS = 2 * RETRY_SECONDS  # for the answers of all hosts, one of which may try a store again
SUM_SECONDS = 180  # for the sum, with the connection of all devices
VISIBLE_SECONDS = 90  # for a shared folder to show what another host made: NFS caches a missing file for 60


class Host(NamedTuple):
    """Describe a host, as JSON can."""

    name: str
    same: dict[str, str]
    """Values that must be the same on all, by name."""
    problems: list[str]


def compare(hosts: Sequence[Host]) -> list[str]:
    """Return a line for each problem, with its host. Most hosts' value counts as right; of two, the first's."""
    names = [f"process {i} ({host.name})" for i, host in enumerate(hosts)]
    wrong = [f"{name}: {problem}" for name, host in zip(names, hosts) for problem in host.problems]
    for what in hosts[0].same:
        values = [host.same.get(what, "nothing") for host in hosts]
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        unlike = [(name, value) for name, value in zip(names, values) if value != usual]
        wrong += [f"{name} has {what} {value}, the others {usual}" for name, value in unlike]
    return wrong


def problems_here(config: Config) -> list[str]:
    """Return the problems of this host with the run's folder, which process 0 has made. Every process must call it."""
    if in_bucket(config.run_dir):
        return on_first_process(partial(with_retries, config.run_dir, partial(refusals, config.run_dir)))
    return on_every_process("its view of the run's folder", partial(problems_on_disk, Path(config.run_dir)))


def problems_on_disk(folder: Path) -> list[str]:
    """Return the problems of this host with a folder on a disk that all share."""
    until = time.monotonic() + VISIBLE_SECONDS
    while not with_retries(str(folder), partial(is_there, folder)):
        if time.monotonic() > until:
            return [f"does not see {folder} of process 0: all hosts must share it"]
        time.sleep(1)
    return [] if folder.is_dir() and os.access(folder, os.W_OK) else [f"cannot write to {folder}"]


def refusals(bucket: str) -> list[str]:
    """Write a file to a run's folder in a bucket, overwrite it as tensorstore does, and delete it. Return what the
    bucket refuses."""
    probe = epath.Path(bucket) / ".preflight-0"
    try:
        probe.write_text("written by the preflight")
        probe.write_text("overwritten")
        probe.unlink()
    except Exception as error:
        if is_transient(error):
            raise
        return [f"cannot write to {bucket}: {first_line(error)}{permission_hint(error)}"]
    return []


def preflight(config: Config, mesh: Mesh, tokenizer: str) -> None:
    """Raise the same UserError on all processes if the hosts cannot train together. End this process with code 42 if
    one of them does not answer. Every process must call it."""
    devices = jax.local_devices()
    same = {"devices": f"{len(devices)} x {devices[0].device_kind}", "tokenizer": tokenizer[:12]}
    same |= {"code": code_digest(), **versions()}
    with time_limit(ANSWER_SECONDS, f"the answers of all hosts take longer than {ANSWER_SECONDS} s"):
        mine = Host(platform.node(), same, problems_here(config))
        hosts = [Host(*json.loads(answer)) for answer in exchange("the preflight's answer", json.dumps(mine))]
    if wrong := compare(hosts):
        raise UserError("the hosts of this run cannot train together:\n  " + "\n  ".join(wrong))
    require_right_sum(mesh)


def require_right_sum(mesh: Mesh) -> None:
    """Compute one sum over all devices with a known result. Raise UserError if it differs; end this process with code
    42 if it does not finish."""
    numbers = np.arange(1, mesh.size + 1, dtype=np.int32)
    at = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    placed = jax.make_array_from_callback(numbers.shape, at, lambda index: numbers[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    with time_limit(SUM_SECONDS, f"the sum over all devices takes longer than {SUM_SECONDS} s"):
        result = int(total(placed).addressable_data(0))
        sums = exchange("the sum over all devices", str(result))
    if wrong := [f"process {i} found {found}" for i, found in enumerate(sums) if int(found) != numbers.sum()]:
        right = f"the sum over all devices is {numbers.sum()}"
        raise UserError(f"{right}, but {', '.join(wrong[:8])}: a device or link is broken")


def require_room(config: Config) -> None:
    """Raise TrainingAborted on all processes if the disk of the run's folder has no room for one more checkpoint."""
    if in_bucket(config.run_dir):
        return
    checkpoint = 4 * 3 * sum(parameter_counts(config.model).values())  # float32 parameters and two moments
    if (free := on_first_process(lambda: shutil.disk_usage(config.run_dir).free)) < checkpoint:
        needed = f"a checkpoint takes {checkpoint / 1e9:.3g} GB"
        raise TrainingAborted(f"{free / 1e9:.3g} GB are free at {config.run_dir}; {needed}: make room, and start again")
