"""nanochat's own code, as it was at a commit."""

import importlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

COMMITS = ("3a5e0bc", "5c93a56", "2c4473d", "aa530cd", "9a88194", "e85db6b", "aba30cb", "6ed7d1d", "a825e63", "92d63d4")
"""At least one of each generation of the network. The published d34 is of 2c4473d."""
SIZES = {"sequence_len": 256, "vocab_size": 300, "n_layer": 4, "n_head": 2, "n_kv_head": 1, "n_embd": 64}
"""A small network, in whose rows of 256 tokens windows of 128 cut."""
needs_nanochat = pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no clone of nanochat")
MODULES = ("gpt", "checkpoint_manager", "tokenizer")


@contextmanager
def nanochat_at(commit: str, folder: Path) -> Iterator[Any]:
    """Yield nanochat's modules `gpt`, `checkpoint_manager` and `tokenizer` of a commit of the clone in NANOCHAT_DIR.
    Its network computes in float32 throughout: it would round embeddings and rotary angles to bfloat16."""
    archive = ["git", "-C", os.environ["NANOCHAT_DIR"], "archive", commit, "nanochat"]
    content = subprocess.run(archive, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as package:
        package.extractall(folder, filter="data")
    network = folder / "nanochat/gpt.py"
    code = network.read_text()
    network.write_text(code.replace(".bfloat16()", ".float()").replace("torch.bfloat16", "torch.float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_DTYPE", "float32")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setitem(sys.modules, "rustbpe", ModuleType("rustbpe"))  # only trains tokenizers
        patch.syspath_prepend(str(folder))
        others = forget_nanochat()
        yield SimpleNamespace(**{name: importlib.import_module(f"nanochat.{name}") for name in MODULES})
        forget_nanochat()
        sys.modules.update(others)


def forget_nanochat() -> dict[str, ModuleType]:
    """Take nanochat's modules out of those that Python has imported, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "nanochat"]
    return {name: sys.modules.pop(name) for name in names}
