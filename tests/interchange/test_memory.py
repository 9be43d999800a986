"""Test that export reads one shard at a time, so that networks larger than memory can be exported."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import CheckpointConfig, Config, ModelConfig
from configs.validation import resolved
from data.prepare.selection import train_tokenizer
from model.gpt import parameter_shapes
from run.folder import write_record
from run.saver import Saver
from training.state import TrainState, split_model

ROOT = Path(__file__).parents[2]
TOKENIZER = train_tokenizer(["to be or not to be " * 20], 272)


def make_run(folder: Path, depth: int, width: int) -> int:
    """Write a run, and return its network's bytes."""
    model = ModelConfig(depth=depth, width=width, heads=16, kv_heads=16, head_dim=64, vocab_size=272, smear=True)
    config = resolved(Config(name="made", run_dir=str(folder), model=model))
    shapes = split_model(model, jnp.dtype("float32"))[1]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.random(leaf.shape, np.float32)), shapes)
    write_record(folder / "config.json", config, "a text's", [])
    TOKENIZER.save(folder / "tokenizer")
    checkpoints = Saver(folder, CheckpointConfig())
    facts = {"tokens": 1, "shapes": parameter_shapes(model)}
    checkpoints.save(1, TrainState(jnp.int32(1), params, (), jnp.int32(0)), facts)
    checkpoints.wait()
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def peak_bytes(folder: Path) -> int:
    """Return the command's peak memory in bytes. (ru_maxrss would start with this process's memory.)"""
    code = "import export; assert export.main() == 0; print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", code, f"--run_dir={folder}", f"--out={folder / 'out'}", "--shard_gigabytes=0.05"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    match = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert match
    return 1024 * int(match[1])


@pytest.mark.slow
def test_the_memory_of_an_export_is_bounded_for_any_network(tmp_path):
    """Export 0.2 GB and 0.7 GB in shards of 0.05 GB: both networks have enough of them to reach the peak of a shard."""
    sizes = make_run(tmp_path / "small", 4, 1024), make_run(tmp_path / "large", 14, 1024)
    assert sizes[1] - sizes[0] > 0.5e9
    growth = peak_bytes(tmp_path / "large") - peak_bytes(tmp_path / "small")
    assert growth < (sizes[1] - sizes[0]) / 2  # the same command's peak varies by 0.06 GB
    assert len(list((tmp_path / "large" / "out").glob("*.safetensors"))) > 6
