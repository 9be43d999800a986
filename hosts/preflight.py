"""Check, before anything is compiled, what the hosts of a run must have in common and what each needs. Messages name
the host.

The hosts exchange this through JAX's coordination service, so a device that does not answer cannot block it. Then all
devices compute one sum with a known result.
"""

import hashlib
import json
import platform
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs.files import shown_bytes
from configs.retry import StorageLost, first_line, patiently, role
from configs.schema import Config, UserError
from hosts.peers import exchange
from hosts.runtime import versions
from hosts.stop import limited_to
from model.gpt import parameter_counts
from model.kernels import attention_kernel
from model.parallel import compute_capability

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "data", "evaluation", "hosts", "interchange", "model", "run", "training")
CLOCKS = 60  # seconds by which hosts' clocks may differ: stores refuse requests with another time
SUM_TIMEOUT = 180  # seconds for the sum, with the connection of all devices
MIN_CUDNN = 91801  # 9.18.1; pyproject.toml asks for it
SEEN = 90  # seconds for a shared folder to show another host's file: NFS caches a missing file for 60


class Host(NamedTuple):
    """Describe a host, as JSON can."""

    name: str
    same: dict[str, str]
    """Values that must be the same on all, by name."""
    clock: float
    """Unix seconds, which all read at the same time."""
    problems: list[str]
    """Problems of this host."""


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the Python files that a run may import: their names and bytes."""
    digest = hashlib.sha256()
    files = [*root.glob("*.py"), *(path for room in ROOMS for path in root.glob(f"{room}/**/*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def compare(hosts: Sequence[Host]) -> list[str]:
    """Return a line for each problem, with its host. Most hosts' value counts as right; of two, the first's."""
    name = lambda i: f"process {i} ({hosts[i].name})"
    wrong = [f"{name(i)}: {problem}" for i, host in enumerate(hosts) for problem in host.problems]
    for what in hosts[0].same:
        values = [host.same.get(what, "nothing") for host in hosts]
        usual = max(values, key=lambda value: (values.count(value), value == values[0]))
        differ = [i for i, value in enumerate(values) if value != usual]
        wrong += [f"{name(i)} has {what} {values[i]}, the others {usual}" for i in differ[:8]]
        wrong += [f"and {len(differ) - 8} other processes differ in {what}"] * (len(differ) > 8)
    middle = float(np.median([host.clock for host in hosts]))
    for i, host in enumerate(hosts):
        if abs(host.clock - middle) > CLOCKS:
            wrong.append(f"{name(i)} has a clock that is {host.clock - middle:+.0f} s from the others'")
    return wrong


def needs(config: Config) -> list[str]:
    """Return the problems of this host: disk space, a shared folder to write to. Every process must call it."""
    first, shared = jax.process_index() == 0, epath.Path(config.run_dir)
    problems, probes = [], []

    def write(folder: epath.Path) -> None:
        probe = folder / f".preflight-{jax.process_index()}"

        def attempt() -> bool:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
            elif not _seen(shared / ".preflight-0"):
                return False
            for text in ("written by the preflight, and deleted", "overwritten, as tensorstore does, and deleted"):
                probe.write_text(text)
            return True

        try:
            if patiently(str(folder), attempt):
                probes.append(probe)
            else:
                problems.append(
                    f"does not see what process 0 wrote to {shared}: all hosts must share it; or give "
                    "--run_dir=gs://BUCKET/RUN"
                )
        except StorageLost:
            raise
        except Exception as error:  # of the disk or the store
            problems.append(f"cannot write to {folder}: {first_line(error)}{role(error)}")

    if first:
        write(shared)
    exchange("the preflight's first file", "")
    if not first:
        write(shared)
    exchange("the preflight's files", "")
    for probe in probes:
        with suppress(Exception):  # they may stay
            probe.unlink()
    checkpoint = 4 * 3 * sum(parameter_counts(config.model).values())  # float32 parameters, two moments
    if not str(shared).startswith("gs://"):
        with suppress(OSError):
            if (free := shutil.disk_usage(shared).free) < checkpoint:
                takes = f"a checkpoint takes {shown_bytes(checkpoint)}"
                problems.append(f"{shown_bytes(free)} are free at {shared}; {takes}")
    problem = lacks_deterministic_attention(config, compute_capability()) if jax.default_backend() == "gpu" else ""
    return [*problems, problem] if problem else problems


def _seen(file: epath.Path) -> bool:
    """Return whether the file is visible here, at the latest after SEEN seconds."""
    until = time.monotonic() + SEEN
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(random.uniform(0.5, 1.5))
    return True


def lacks_deterministic_attention(config: Config, capability: float) -> str:
    """Return what to install if cuDNN has no deterministic backward attention for a GPU of this compute capability, or
    "". On Blackwell it has one from MIN_CUDNN on (TransformerEngine pull request 2584)."""
    model, length, documents = config.model, config.batch.sequence_length, config.data.mask_documents
    kernel = attention_kernel("gpu", capability, model.dtype, length, model.head_dim, documents)
    installed = fused_attention_stablehlo.check_cudnn_version()
    if kernel != "cudnn" or not config.deterministic or capability < 10 or installed >= MIN_CUDNN:
        return ""
    dotted = lambda version: f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return (
        f"cuDNN {dotted(installed)} has no deterministic attention for this GPU: install "
        f"nvidia-cudnn-cu13>={dotted(MIN_CUDNN)}, or give --deterministic=False"
    )


def about(config: Config, fingerprint: str, tokenizer: str) -> Host:
    """Return this host. Every process must call it."""
    devices = jax.local_devices()
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()[:12]
    same = {
        "code": code_digest(),
        **versions(),
        "config": digest(json.dumps(config, default=vars, sort_keys=True)),
        "data": fingerprint[:12],
        "tokenizer": tokenizer[:12],
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }
    problems = needs(config)
    exchange("the preflight", "")  # so that all read their clocks together
    return Host(platform.node(), same, time.time(), problems)


def preflight(config: Config, mesh: Mesh, fingerprint: str, tokenizer: str) -> list[Host]:
    """Return every host if all can train together; else raise the same UserError on all. Every process must call
    it."""
    mine = json.dumps(about(config, fingerprint, tokenizer))
    hosts = [Host(*json.loads(answer)) for answer in exchange("the preflight's answer", mine)]
    if wrong := compare(hosts):
        raise UserError("the hosts of this run cannot train together:\n  " + "\n  ".join(wrong))
    checked_sum(mesh)
    return hosts


def checked_sum(mesh: Mesh) -> None:
    """Compute one sum over all devices with a known result. Raise UserError if it differs; ends all processes with code
    42 if it does not finish."""
    numbers = np.arange(1, mesh.size + 1, dtype=np.int32)
    at = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    placed = jax.make_array_from_callback(numbers.shape, at, lambda index: numbers[index])
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    with limited_to(SUM_TIMEOUT, f"the sum over all devices takes longer than {SUM_TIMEOUT} s"):
        result = int(total(placed).addressable_data(0))
    expected = int(numbers.sum())
    sums = exchange("the sum over all devices", str(result))
    if wrong := [f"process {i} found {sum_}" for i, sum_ in enumerate(sums) if sum_ != str(expected)]:
        raise UserError(
            f"the sum over all devices is {expected}, but {', '.join(wrong[:8])}: a device or link is broken"
        )
