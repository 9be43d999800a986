"""Start and end a command: JAX's settings, several processes, exit codes."""

import hashlib
import logging
import os
import platform
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from glob import glob
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge  # its errors have no public API
from jax.sharding import Mesh

from hosts.distributed import HEARTBEAT_SECONDS, everyone_is_here, join, on_every_process
from hosts.machines import GPU_FRACTION
from system.errors import UserError
from system.exits import ending_of, reason_of_end, report
from system.files import PASSING, cache_dir, first_line
from system.messages import LOGGER, ignore_output_errors, repair_streams, show_messages
from training.mesh import axes_between, device_groups, sizes_of

ROOT = Path(__file__).parents[1]
ROOMS = (
    "configs",
    "data",
    "evaluation",
    "generation",
    "hosts",
    "model",
    "options",
    "reinforcement",
    "run",
    "system",
    "training",
)
OPEN_FILES = 10_240  # macOS may refuse more (its OPEN_MAX)
EXIT_SECONDS = 60  # that a command with a result waits for its threads
SETTINGS = {
    # Random numbers, and the parameters that are made of them.
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
    "jax_accurate_erf_inv": False,
    # Types and precision; stricter rules refuse the network.
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_allow_f16_reductions": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    # Without compilation, sums have another order.
    "jax_disable_jit": False,
}
"""JAX's settings that a result depends on, and their values in every run. JAX reads each from the environment when it
is imported; a config file could set it, too."""
LEAVE_SECONDS = 5  # that a process with an error waits for the others, which may have the same one


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command and exit with its code, or that of its exception (`system.exits.ending_of`). A process that ends
    alone does not wait for the others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1024: few for shards and connections
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)  # infinity is -1
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    repair_streams()
    ignore_output_errors("stderr")
    error: BaseException | None = None
    try:
        code = main()
        sys.stdout.flush()
    except BaseException as raised:
        error = reason_of_end(raised)
        code = report(error)
    if jax.distributed.is_initialized():
        leave(error)
    exits = threading.Event()
    threading.Thread(target=limit_exit, args=(exits, code), daemon=True).start()
    threading._register_atexit(exits.set)  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(code)


def limit_exit(exits: threading.Event, code: int) -> None:
    """End this process with its code if its threads have not ended EXIT_SECONDS after `exits`: they may wait for a disk
    that hangs. `exits`: when Python begins to wait for them, where nothing can start a thread."""
    exits.wait()
    time.sleep(EXIT_SECONDS)
    os._exit(code)


def leave(error: BaseException | None) -> None:
    """Leave the other processes of the run: together with them if all have come to their end, else, after an error, at
    once, by the end of this process."""
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError):
            output.flush()
    if error is None:
        everyone_is_here(LEAVE_SECONDS)
    else:
        leave_with_error(error)
    jax.distributed.shutdown()  # waits for the others


def leave_with_error(error: BaseException) -> None:
    """End this process with the code of its error, unless all processes of the run end now."""
    together, alone = ending_of(error), ending_of(error, alone=True)
    others_decide = alone.code != together.code
    if everyone_is_here(LEAVE_SECONDS + HEARTBEAT_SECONDS if others_decide else LEAVE_SECONDS):
        return
    if others_decide:
        print(alone.message, file=sys.stderr)
    os._exit(alone.code)


def report_unless_loop_is_closed(unraisable: Any) -> None:
    """Print an exception that nothing can catch. After a save that failed, tensorstore has one for each write that it
    had begun, since Orbax has closed the event loop; the commands report the failure itself."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def start_jax() -> None:
    """Join the other processes of the run, if there are any, cache compiled programs on disk, and show messages.

    Start every process with the same command. Raise UserError if their settings are incomplete or contradictory.
    """
    of_user = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if of_user is None:  # JAX_COMPILATION_CACHE_DIR names none
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(GPU_FRACTION)  # JAX alone would leave a quarter of a GPU unused
    for library in ("absl", "asyncio"):  # their messages repeat the commands' own
        logging.getLogger(library).setLevel(logging.CRITICAL)
    sys.unraisablehook = report_unless_loop_is_closed
    show_messages(first=join() == 0)
    keep_settings()
    flags = os.environ.get("XLA_FLAGS", "")
    on_every_process("its flags for XLA", partial(require_known_flags, flags))
    on_every_process("its devices", require_platform)  # which waits for the others', but not without end
    on_every_process("its flags for XLA", partial(require_finite_checks, flags))


def keep_settings() -> None:
    """Set the settings that a result depends on to their values, whatever the environment says."""
    for name, value in SETTINGS.items():
        given = getattr(jax.config, name, value)  # earlier versions of JAX lack some
        if given != value:
            LOGGER.info(f"{name.upper()}={given} is not used: a run's numbers do not depend on the environment")
            jax.config.update(name, value)


@cache
def require_known_flags(flags: str) -> None:
    """Raise UserError if XLA does not know these flags of XLA_FLAGS: it would end the process with an abort. So a
    process of its own reads them."""
    if not flags:
        return
    read = [sys.executable, "-P", "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    ended = subprocess.run(read, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True)
    if ended.returncode:
        reason = re.search(r"\] (.*flag.*)", ended.stderr)
        raise UserError(
            f"XLA_FLAGS={flags}: {reason[1] if reason else ended.stderr.strip()}; correct the variable, or unset it "
            "(flags of TPUs belong in LIBTPU_INIT_ARGS)"
        )


def require_finite_checks(flags: str) -> None:
    """Raise UserError if programs that XLA compiles with these flags of XLA_FLAGS take NaN or an infinity for a finite
    number. A step could then not skip a gradient that is not finite."""
    if not flags:
        return
    # As a step asks of the norm of its gradient. Earlier versions of JAX see an argument's NaN, and not a sum's.
    has_finite_norm = jax.jit(lambda gradient: jnp.isfinite(jnp.sqrt(jnp.sum(jnp.square(gradient)))))
    if any(has_finite_norm(np.array([1, bad], np.float32)) for bad in (np.nan, np.inf)):
        raise UserError(
            f"XLA_FLAGS={flags}: programs then take NaN for a finite number, and a step would not skip a gradient that "
            "is not finite; leave out the flags of fast math"
        )


def require_platform() -> None:
    """Raise UserError if the devices that JAX_PLATFORMS names are not here. Without it, raise UserError if JAX would
    train on the CPU although the machine has an accelerator."""
    platforms = os.environ.get("JAX_PLATFORMS")
    gpus = glob("/dev/nvidia[0-9]*") if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") else []
    found = gpus + glob("/dev/accel[0-9]*")
    if platforms == "cpu" or not (platforms or found):
        return
    try:
        if jax.default_backend() == "cpu" and not platforms:
            raise RuntimeError(xla_bridge._backend_errors.get("cuda" if gpus else "tpu", "no plugin for it works"))
    except (AssertionError, RuntimeError) as error:  # AssertionError: a plugin found no driver, and JAX logged why
        if PASSING.search(str(error)):  # a TPU that another process still holds
            raise
        what = f"JAX_PLATFORMS={platforms}" if platforms else f"{found[0]} is here"
        raise UserError(
            f"{what}: JAX finds no such device ({first_line(error)}); install its plugin and driver "
            "(docs/get-started.md), or set JAX_PLATFORMS=cpu to use the CPU"
        ) from error


def describe_processes(mesh: Mesh) -> str:
    """Return a line with the processes, devices, slices, and the mesh over them."""
    groups = device_groups(list(mesh.devices.flat))
    between = axes_between(mesh)
    axes = ", ".join(f"{name} {size}{' (across them)' * (name in between)}" for name, size in sizes_of(mesh).items())
    devices = f"{mesh.size} {mesh.devices.flat[0].device_kind} device{'s' * (mesh.size > 1)}"
    if len(groups) > 1:
        devices += f" in {len(groups)} slices or nodes"
    if jax.process_count() > 1:
        process = f"process {jax.process_index()} of {jax.process_count()}"
        devices = f"{process}, with {len(mesh.local_devices)} of {devices}"
    return f"{devices}; mesh: {axes}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the main packages, for config.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the Python files that a run may import: their names and bytes."""
    digest = hashlib.sha256()
    files = [*root.glob("*.py"), *(path for room in ROOMS for path in root.glob(f"{room}/**/*.py"))]
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
