"""Use eight CPU devices in one process, check array types at run time, and keep a compilation cache per session."""

import atexit
import errno
import gc
import io  # noqa: F401
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Shells start background processes with Ctrl-C ignored. The processes that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests start hundreds of processes. Without stored bytecode, as in some container images, each takes 6 s longer.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Workers and the processes that tests start inherit this: each loads what another has compiled.
    cache = os.environ["TOKENSUM_CACHE"] = tempfile.mkdtemp(prefix="tokensum-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # LLVM and MLIR take half of most tests' time. XLA's own passes decide what is computed, and stay on. `XLA_FLAGS=`
    # runs exactly the programs that ship.
    flags = ["--xla_backend_optimization_level=0"]
    if version("jax") < "0.11":  # later versions lack the flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from run.folder import storage_path
from system.messages import LOGGER
from tests.fake_gcs import FakeGCS

# Traced programs are millions of objects without cycles. Searching them took a fifth of most tests' time.
gc.freeze()
gc.set_threshold(200_000, 20, 20)
jax.config.update("jax_num_cpu_devices", 8)
checked = ["model", "training", "data", "evaluation", "generation", "interchange", "reinforcement", "tools.programs"]
install_import_hook(checked, "beartype.beartype")
# Compiling and drawing an example is slow on a shared machine.
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True, suppress_health_check=slow
)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each process begin with its share of the slow tests. A long test that starts last leaves a core idle."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = -(-len(others) // count)
    items[:] = [item for i in range(count) for item in slow[i::count] + others[i * size : (i + 1) * size]]


@pytest.fixture(autouse=True)
def ignored_pipes():
    """Ignore SIGPIPE, as Python does. `--help` gives it back to the system for its process, which a test may share."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(scope="module")
def gcs_server():
    """Start one server for all tests of a file, since gcsfs and tensorstore remember its address."""
    server = FakeGCS()
    storage_path("gs://bucket")  # as each command does first: no listing is remembered
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server
    server.shutdown()


@pytest.fixture
def gcs(gcs_server) -> FakeGCS:
    """Return an empty store without faults."""
    gcs_server.reset()
    return gcs_server


@pytest.fixture
def unanswered(monkeypatch) -> set[str]:
    """Return a set of names. A disk does not answer for paths with these names, as NFS does while a server restarts.
    `Path.exists` then says False, as Python 3.14's does."""
    names: set[str] = set()

    def answers_only_others(function: Callable) -> Callable:
        def wrapped(path, *arguments, **options):
            if names and not isinstance(path, int) and os.path.basename(path) in names:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
            return function(path, *arguments, **options)

        return wrapped

    for name in ("os.stat", "os.listdir", "os.scandir", "io.open"):
        module, _, attribute = name.partition(".")
        monkeypatch.setattr(name, answers_only_others(getattr(sys.modules[module], attribute)))
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))
    monkeypatch.setattr(Path, "is_file", lambda path: os.path.isfile(path))
    monkeypatch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    return names


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Clear JAX's caches before the process runs out of memory mappings. Each program that XLA's CPU compiler has
    loaded uses about twenty of the 65,530 that Linux allows (vm.max_map_count). Cleared programs are read again from
    disk."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 15_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def messages(monkeypatch) -> Iterator[list[str]]:
    """Yield a list to which each message is appended."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    monkeypatch.setattr(LOGGER, "handlers", [handler])
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    yield texts
    LOGGER.setLevel(before)
