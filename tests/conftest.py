"""Eight CPU devices in one process, array types checked at run time, and a cache of the session's own."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOKENSUM_CACHE"] = tempfile.mkdtemp(prefix="tokensum-tests-")

import hypothesis
import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)
install_import_hook(["model", "training", "data", "interchange"], "beartype.beartype")
# Examples compile programs, which takes what it takes on a shared machine.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tests")
