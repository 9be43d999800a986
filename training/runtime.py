"""How a command starts and ends: JAX's settings, signals, exit codes."""

import logging
import os
import platform
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax

from configs.schema import UserError

INTERRUPTED = 130


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
    """Keeps compiled programs on disk between runs, and the libraries' chatter off the terminal."""
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "compiled"))
    logging.getLogger("absl").setLevel(logging.ERROR)


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
