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

from configs.interrupt import INTERRUPTED, raise_at_interrupt
from configs.schema import UserError

FAILED, MISTAKEN, UNREADABLE = 1, 2, 3  # exit codes, with INTERRUPTED; 0: complete, or preempted and saved
SILENCE = 30  # seconds without a sign of life after which a process counts as lost


class NoCheckpoint(Exception):
    """A run has checkpoints, and none can be read."""


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs a command and exits with its code; a UserError becomes its message and code 2."""
    raise_at_interrupt()
    try:
        code = main()
    except (UserError, NoCheckpoint) as error:
        print(f"error: {error}", file=sys.stderr)
        code = MISTAKEN if isinstance(error, UserError) else UNREADABLE
    except KeyboardInterrupt:
        print("interrupted outside of training; nothing was lost", file=sys.stderr)
        code = INTERRUPTED
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"error: process {jax.process_index()} cannot go on: another one has stopped, or cannot be reached; start "
            f"all again, and they continue ({str(error).splitlines()[0][:200]})",
            file=sys.stderr,
            flush=True,
        )
        os._exit(FAILED)  # an orderly end would wait for the others
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
    for library in ("absl", "asyncio"):  # what goes wrong is told where it matters
        logging.getLogger(library).setLevel(logging.CRITICAL)
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
        jax.distributed.initialize(address, int(count or 0), int(index or 0), heartbeat_timeout_seconds=SILENCE)
    elif on_tpu or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize(heartbeat_timeout_seconds=SILENCE)


def check_hosts_agree(about: str, value: str) -> None:
    """UserError on every process where their `value`s are not all the same. Every process must call it."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest).reshape(-1, digest.size)
    different = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
    if different:
        raise UserError(
            f"of {len(digests)} processes, {different} differ from process 0 in {about}; start all with one command"
        )


def highest(value: int) -> int:
    """The highest of the processes' values. Every process must call it."""
    return value if jax.process_count() == 1 else int(multihost_utils.process_allgather(np.int32(value)).max())


def on_first_process(function: Callable[[], list]) -> list:
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


class Stop:
    """Inside `with`, Ctrl-C and SIGTERM (a preemption notice) become a request to stop, that all processes of a run
    heed after the same step. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code of whoever asked this process to stop."""

    def __enter__(self) -> "Stop":
        self.before = {signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt)}
        if jax.process_count() == 1:  # else JAX's preemption service has taken SIGTERM, and tells the others
            self.before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._preempt)
        return self

    def _interrupt(self, *_: object) -> None:
        self.code = INTERRUPTED
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _preempt(self, *_: object) -> None:
        self.code = 0

    def after(self, step: int) -> bool:
        """Whether the run is to stop after this step. Every process must ask after every step."""
        if jax.process_count() == 1:
            return self.code is not None
        return multihost_utils.reached_preemption_sync_point(step)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Peak bytes on the first device: as it reports them, else what the program's own analysis says."""
    measured = jax.local_devices()[0].memory_stats()
    if measured and "peak_bytes_in_use" in measured:
        return measured["peak_bytes_in_use"]
    analysis: Any = compiled.memory_analysis()
    # Donated arguments and the outputs that take their place are one.
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + outputs + analysis.temp_size_in_bytes
