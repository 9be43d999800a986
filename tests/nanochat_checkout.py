"""Import nanochat's modules from the checkout NANOCHAT_DIR."""

import importlib
import os
from types import ModuleType


def import_nanochat(patch, *names: str) -> tuple[ModuleType, ...]:
    """Return modules of its package, in float32 and without compilation."""
    patch.setenv("NANOCHAT_DTYPE", "float32")
    patch.setenv("TORCHDYNAMO_DISABLE", "1")
    patch.syspath_prepend(os.environ["NANOCHAT_DIR"])
    return tuple(importlib.import_module(f"nanochat.{name}") for name in names)
