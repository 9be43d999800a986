"""Start and end a command: JAX's settings, several processes, signals, exit codes."""

import errno
import hashlib
import json
import logging
import os
import platform
import random
import resource
import select
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.error import HTTPError

import jax
from jax.sharding import Mesh

from configs.command_line import Exit
from configs.files import cache_dir
from configs.messages import outlive_the_log, repair_streams, show_messages
from configs.retry import PASSING, StorageLost, first_line, passes
from configs.schema import UserError
from hosts.cluster import Cluster, PeerLost, detect
from hosts.machines import GPU_FRACTION
from hosts.peers import end_all, exchange, join, leave
from training.mesh import axes_between, islands, sizes_of

MINUTE = 60  # seconds in which another process may still write a compiled program
OPEN_FILES = 10_240  # macOS may refuse more (its OPEN_MAX)
OF_THE_PROGRAM = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # errors that would recur


class NoCheckpoint(Exception):
    """Raised if a run has checkpoints, and none can be read."""


class TrainingAborted(Exception):
    """Raised if another step makes no sense, for this reason: exit code 1."""


class StartAgain(Exception):
    """Raised if another start continues the run, for this reason: exit code 42."""


class Damaged(ValueError):
    """Raised if a saved file is missing, or its content differs."""


KINDS = (UserError, StorageLost, Damaged)  # exceptions that all processes raise if one does
T = TypeVar("T")


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its code. A UserError becomes its message and code 2, a full disk a message and 1. A
    disk, store or network that fails is 42. If one of several processes ends by an exception, all end with its
    code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1024: few for shards and connections
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    repair_streams()
    outlive_the_log("stderr")
    ended: BaseException | None = None
    try:
        code = main()
        leave()
        sys.stdout.flush()
    except (UserError, NoCheckpoint) as error:
        print(f"error: {error}", file=sys.stderr)
        code, ended = Exit.MISTAKE if isinstance(error, UserError) else Exit.UNREADABLE, error
    except KeyboardInterrupt as error:
        print("interrupted outside training; earlier checkpoints are intact", file=sys.stderr)
        code, ended = Exit.INTERRUPTED, error
    except TrainingAborted as error:
        print(f"error: {error}", file=sys.stderr)
        code, ended = Exit.FAILED, error
    except (StorageLost, StartAgain) as error:
        print(f"error: {error}; start all again", file=sys.stderr)
        code, ended = Exit.PEER_LOST, error
    except PeerLost as error:
        print(f"error: {error}; start all again", file=sys.stderr, flush=True)
        os._exit(Exit.PEER_LOST)  # an orderly end would wait for the others
    except SystemExit as end:
        code, ended = end.code if isinstance(end.code, int) else Exit.FAILED if end.code else Exit.COMPLETE, end
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(Exit.FAILED)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        lost = not full and passes(error)  # some reads and writes have no retries of their own
        if not (full or lost or jax.distributed.is_initialized()):
            raise
        code, ended = Exit.PEER_LOST if lost else Exit.FAILED, error
        if isinstance(error, OSError) and full:
            print(f"error: {error.filename or 'a file'} cannot be written: {error.strerror}", file=sys.stderr)
        elif _of_a_peer(error):
            code = Exit.PEER_LOST
            print(
                f"error: process {jax.process_index()} cannot continue: another one has stopped, or cannot be reached; "
                f"start all again, and they resume ({first_line(error)[:200]})",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
    if ended and jax.distributed.is_initialized():  # maybe this process alone
        end_all(code, f"{type(ended).__name__}: {first_line(ended)}")
    sys.exit(code)


def _nobody_reads() -> bool:
    """Return whether the program that reads the output has ended, as `| head` does. Drop Python's buffered output."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if ended := any(flags & select.POLLERR for _, flags in output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ended


def _of_a_peer(error: Exception) -> bool:
    """Return whether an operation of all processes failed because another one is missing."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return not str(error).startswith(OF_THE_PROGRAM)
    return isinstance(error, ValueError) and str(error).startswith("UNKNOWN: Gloo")  # seen with JAX 0.10.2


def report_unless_loop_is_closed(unraisable: Any) -> None:
    """Print an exception that nothing can catch. After a save that failed, tensorstore has one for each write that it
    had begun, since Orbax has closed the event loop; the commands report the failure itself."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def start_jax() -> Cluster:
    """Join the other processes of the run, if there are any, cache compiled programs on disk, and show messages.

    Start every process with the same command; hosts/cluster.py finds the others. Raise UserError if their settings are
    incomplete or contradictory, PeerLost if one does not join.
    """
    compiled = cache_dir() / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    remove_empty_programs(compiled)
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_FRACTION)  # JAX alone would leave a quarter of a GPU unused
    for library in ("absl", "asyncio"):  # their messages repeat the commands' own
        logging.getLogger(library).setLevel(logging.CRITICAL)
    sys.unraisablehook = report_unless_loop_is_closed
    tpus = len(glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")) if find_spec("libtpu") else 0
    cluster = detect(os.environ, tpus, len(glob("/dev/nvidia[0-9]*")), google_metadata)
    if cluster.processes > 1 and not jax.distributed.is_initialized():
        join(cluster)
    show_messages(first=cluster.index == 0)
    require_platform()
    return cluster


def require_platform() -> None:
    """Raise UserError if the devices that JAX_PLATFORMS names are not here."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms in (None, "", "cpu"):
        return
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # AssertionError: a plugin found no driver, and JAX logged why
        if PASSING.search(str(error)):  # a TPU that another process still holds
            raise
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device here ({first_line(error)}); install its plugin and "
            "driver (docs/get-started.md), or unset JAX_PLATFORMS"
        ) from error


def remove_empty_programs(folder: Path) -> None:
    """Delete the compiled programs of 0 bytes, which a power cut leaves: JAX would warn of them at each start, and
    never write them again (compare jax issue 39880)."""
    for path in folder.glob("*"):
        with suppress(OSError):  # another process was first
            if not path.stat().st_size and time.time() - path.stat().st_mtime > MINUTE:
                path.unlink()


def google_metadata(key: str) -> str:
    """Return an attribute of this Google Cloud machine; empty if it has none, or is not one."""
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    for _ in range(3):
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.read().decode()
        except HTTPError:  # it has no such attribute
            break
        except OSError:
            time.sleep(random.uniform(0.5, 1.5))
    return ""


def describe_processes(cluster: Cluster, mesh: Mesh) -> str:
    """Return a line with the launcher, the processes, devices, slices, and the mesh over them."""
    groups = islands(list(mesh.devices.flat))
    between = axes_between(mesh)
    axes = ", ".join(f"{name} {size}{' (across them)' * (name in between)}" for name, size in sizes_of(mesh).items())
    device, here = mesh.devices.flat[0], len(mesh.local_devices)
    return (
        f"launcher: {cluster.launcher}; process {cluster.index} of {cluster.processes}; {here} of {mesh.size} "
        f"{device.device_kind} device(s) here, in {len(groups)} slice(s) or node(s); mesh: {axes}"
    )


def check_hosts_agree(about: str, value: str) -> None:
    """Raise UserError on every process if their `value`s differ. Every process must call it."""
    digests = exchange(about, f"{hashlib.sha256(value.encode()).hexdigest()} {platform.node()}")
    values, hosts = zip(*(answer.split(" ", 1) for answer in digests))
    different = [i for i, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(
            f"of {len(digests)} processes, {different} differ from process 0 in {about} (on "
            f"{', '.join(hosts[i] for i in different[:8])}; process 0 on {hosts[0]}); start all with one command"
        )


def max_over_processes(value: int) -> int:
    """Return the highest of the processes' values, through JAX's service. If one process does not ask, no
    computation of the others' devices waits for it. Every process must call it."""
    return max(map(int, exchange("a decision", str(int(value)))))


def on_first_process(function: Callable[[], Any]) -> Any:
    """Return the result of `function` on process 0 to every process, through JSON. Raise as `on_every_process` does.
    Every process must call it."""
    if jax.process_count() == 1:
        return function()
    answer = lambda: json.dumps(function() if jax.process_index() == 0 else None)
    return json.loads(_together("an answer", answer, str)[1][0])


def on_every_process(what: str, function: Callable[[], T]) -> T:
    """Return the result of `function` here, once it has returned on every process. If it raises one of KINDS on some,
    all raise the first kind in that order, with the process's number; other exceptions end the run at once. The
    processes agree through JAX's service, and `function` must not wait for another process."""
    return _together(what, function, lambda result: "")[0]


def _together(what: str, function: Callable[[], T], shown: Callable[[T], str]) -> tuple[T, list[str]]:
    """Return the result of `function` here, and `shown` of every process's, in one exchange."""
    failure: Exception | None = None
    result: Any = None
    try:
        result = function()
    except KINDS as error:
        failure = error
    kind = next((str(i) for i, kind in enumerate(KINDS) if isinstance(failure, kind)), "")
    answers = [answer.split(" ", 1) for answer in exchange(what, f"{kind} {failure or shown(result)}")]
    if failed := [(kind, message, i) for i, (kind, message) in enumerate(answers) if kind]:
        kind, message, i = min(failed)
        raise KINDS[int(kind)](message if len(answers) == 1 else f"process {i}: {message}") from failure
    return result, [answer for _, answer in answers]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages, for config.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}
