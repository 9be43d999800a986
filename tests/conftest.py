"""Eight CPU devices in one process, array types checked at run time, and a cache of the session's own."""

import atexit
import os
import shutil
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:
    # The workers inherit it, and so do the processes that tests start: what one has compiled, all can load.
    cache = os.environ["TOKENSUM_CACHE"] = tempfile.mkdtemp(prefix="tokensum-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": f"{cache}/compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # LLVM takes half of most tests' time; XLA's own passes, which decide what is computed, stay as they are.
    # XLA_FLAGS= runs the programs that ship, to the instruction.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook(["model", "training", "data", "interchange"], "beartype.beartype")
# Examples compile programs, which takes what it takes on a shared machine.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tests")
