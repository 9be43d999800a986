"""Test that export reads one shard at a time, so that networks larger than memory can be exported."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import export
from options.schema import Config, ModelConfig
from options.validation import resolved
from tests.run.written import write_run
from training.sharded import split_model
from training.state import TrainState


def make_run(folder: Path) -> int:
    """Write a run, and return its network's bytes."""
    model = ModelConfig(depth=8, width=512, heads=8, kv_heads=8, head_dim=64, vocab_size=272, smear=True)
    random, shapes = np.random.default_rng(0), split_model(model, jnp.dtype("float32"))[1]
    params = jax.tree.map(lambda leaf: jnp.asarray(random.random(leaf.shape, np.float32)), shapes)
    state = TrainState(jnp.int32(1), params, (), jnp.int32(0))
    write_run(folder, resolved(Config(name="made", run_dir=str(folder), model=model)), state)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def bytes_of(name: str) -> int:
    """Return this process's memory, now (`VmRSS`) or at its peak (`VmHWM`)."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])


@pytest.mark.medium
def test_the_memory_of_an_export_is_bounded_for_any_network(tmp_path, monkeypatch):
    """Export 0.1 GB in shards of 0.005 GB."""
    size, out = make_run(tmp_path / "run"), tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["export", f"--run_dir={tmp_path}/run", f"--out={out}", "--shard_gigabytes=0.005"])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from the memory of now
    before = bytes_of("VmRSS")
    assert export.main() == 0
    assert bytes_of("VmHWM") - before < size / 3  # 0.2 of it; 0.6 if every shard is read before the first is written
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) >= size
