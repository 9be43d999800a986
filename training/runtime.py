"""How a command starts and ends: JAX's settings, signals, exit codes."""

import hashlib
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from configs.schema import UserError

FAILED, INTERRUPTED = 1, 130  # exit codes; 2 is a user's mistake


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its code; a UserError becomes its message and code 2."""
    try:
        code = main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted outside of training; nothing was lost", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def cache_dir() -> Path:
    """Where prepared datasets and compiled programs are kept: TOKENSUM_CACHE, or ~/.cache/tokensum."""
    return Path(os.environ.get("TOKENSUM_CACHE") or "~/.cache/tokensum").expanduser()


def start_jax() -> None:
    """Joins the other processes of the run, if there are any, and keeps compiled programs on disk between runs.

    Every process is started with the same command. JAX finds the others on TPU pods and under SLURM; elsewhere
    JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID name them.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    logging.getLogger("absl").setLevel(logging.ERROR)
    if jax.distributed.is_initialized():
        return
    named = [os.environ.get(name) for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    on_tpu = find_spec("libtpu") and (glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*"))
    if any(named):
        address, count, index = named
        if not (address and (count or "").isdigit() and (index or "").isdigit()):
            raise UserError(
                "JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID (numbers) belong together; "
                f"found {named}"
            )
        jax.distributed.initialize(address, int(count or 0), int(index or 0))
    elif on_tpu or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


def check_hosts_agree(about: str, value: str) -> None:
    """UserError on every process where their `value`s are not all the same. Every process must call it."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest).reshape(-1, digest.size)
    different = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
    if different:
        raise UserError(
            f"of {len(digests)} processes, {different} differ from process 0 in {about}; start all with one command"
        )


def on_first_process(function: Callable[[], list[str]]) -> list[str]:
    """What `function` returns on process 0, on every process; a UserError there is raised on every process."""
    if jax.process_count() == 1:
        return function()
    told: dict = {}
    if jax.process_index() == 0:
        try:
            told = {"result": function()}
        except UserError as error:
            told = {"error": str(error)}
    text = np.frombuffer(json.dumps(told).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    text = multihost_utils.broadcast_one_to_all(np.resize(text, size))
    told = json.loads(bytes(text))
    if "error" in told:
        raise UserError(told["error"])
    return told["result"]


def versions() -> dict[str, str]:
    """What a run was made with, for config.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


class Interrupt:
    """Inside `with`, the first Ctrl-C becomes a flag that the loop reads between steps; the second ends the process."""

    def __enter__(self) -> "Interrupt":
        self.requested = False
        self.before = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, *_: object) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak bytes on the first device: as it reports them, else what the program's own analysis says."""
    measured = jax.local_devices()[0].memory_stats()
    if measured and "peak_bytes_in_use" in measured:
        return measured["peak_bytes_in_use"]
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that take their place are one.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes
