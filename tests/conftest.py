"""Eight CPU devices in one process, array types checked at run time, and a cache of the session's own."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version

if "PYTEST_XDIST_WORKER" not in os.environ:
    # A process that a shell runs in the background ignores Ctrl-C, and so would those that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests start hundreds of processes. Each takes 6 s more where a container image says that no bytecode is kept.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # The workers inherit it, and so do the processes that tests start: what one has compiled, all can load.
    cache = os.environ["TOKENSUM_CACHE"] = tempfile.mkdtemp(prefix="tokensum-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # LLVM and MLIR take half of most tests' time; XLA's own passes, which decide what is computed, stay as they are.
    # XLA_FLAGS= runs the programs that ship, to the instruction.
    flags = ["--xla_backend_optimization_level=0"]
    if version("jax") < "0.11":  # the flag is gone there
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

from pathlib import Path

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

from tests.fake_gcs import FakeGCS

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook(["model", "training", "data", "evaluation", "interchange", "tools.programs"], "beartype.beartype")
# Examples compile programs, and are drawn, in the time that it takes on a shared machine.
slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, print_blob=True, suppress_health_check=slow
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="module")
def gcs_server():
    """gcsfs and tensorstore remember where their server is: one for all the tests of a file."""
    server = FakeGCS()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server
    server.shutdown()


@pytest.fixture
def gcs(gcs_server) -> FakeGCS:
    """A store that is well, and holds nothing."""
    gcs_server.reset()
    return gcs_server


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Each program that XLA's CPU compiler has loaded holds some twenty of the 65,530 memory mappings that Linux gives
    a process (vm.max_map_count). At the last one the process crashes, wherever it is. What a test asks for again is
    read from the cache on disk."""
    yield
    if len(Path("/proc/self/maps").read_text().splitlines()) > 15_000:
        jax.clear_caches()
