"""Test that sizes of activations and updates follow from width and depth as bench/LOG.md says.

A coordinate check (arXiv:2203.03466, D.1) of configs/nanochat.py's network and optimizer, with its rates for steps of
2^19 tokens. Each network takes its first ten steps, of 512 tokens. A size is a root mean square (RMS).
"""

import re
import sysconfig
from collections import defaultdict

import jax
import numpy as np
import pytest
from flax import nnx

from bench.exactness import text_of
from configs.nanochat import get_config
from data.loader import StepBatches, to_devices
from options.schema import with_options
from options.validation import resolved
from training.build import build
from training.optimizer import path_name
from training.sharded import split_model

STEPS, ROWS, LENGTH, HEAD_DIM = 10, 4, 128, 32
INITIAL, CHANGE, NORM = "initial size", "change", "norm of the change"
ATTENTION = [f"blocks.attention.{name}" for name in ("query", "key", "value", "out")]
MUON = [f"{name}.kernel" for name in (*ATTENTION, "blocks.mlp.up", "blocks.mlp.down")]
CONSTANT = {(INITIAL, name): 0.0 for name in ("embed", "blocks", *ATTENTION[:3], "blocks.mlp.up")}
CONSTANT |= {(NORM, name): 0.0 for name in MUON}
WIDTH = CONSTANT | {
    (INITIAL, "blocks.attention.value_embedding"): -0.5,
    (INITIAL, "lm_head"): 0.5,
    (CHANGE, "embed.table"): -0.5,
    (CHANGE, "blocks.attention.value_embedding.table"): -0.5,
    (CHANGE, "lm_head.kernel"): -0.5,
}
"""Exponents of the width."""
Sizes = dict[tuple[str, str], float]
"""By quantity and kind, the RMS over all layers. A kind is a part's or a parameter's name without the layer."""


def sizes_of(width: int, depth: int) -> Sizes:
    """Train for ten steps. Return the sizes of each part's output on the first batch, and of each parameter: before,
    and of the change; for a matrix's change also its norm."""
    heads = width // HEAD_DIM
    model = {"width": width, "depth": depth, "heads": heads, "kv_heads": heads, "head_dim": HEAD_DIM}
    batch = {"sequence_length": LENGTH, "tokens_per_step": ROWS * LENGTH, "rows_per_device": ROWS}
    options = {f"model.{name}": value for name, value in {**model, "vocab_size": 1024, "dtype": "float32"}.items()}
    options |= {f"batch.{name}": value for name, value in batch.items()}
    options |= {"data.source": f"{sysconfig.get_path('stdlib')}/a*.py"}
    config = resolved(with_options(get_config(), options))
    built = build(config, jax.devices()[:1])
    text = text_of(config.data, config.model.vocab_size, LENGTH, ROWS)
    batches = StepBatches(text.train, text.mixture, config.seed, built.batch_shape, np.arange(ROWS), text.document_bos)
    graphdef, _ = split_model(config.model, built.dtype)
    state, probe = built.create_state(), batches[0]["inputs"][0]

    @jax.jit
    def outputs(params: dict, tokens: jax.Array) -> dict:
        record = nnx.capture(nnx.merge(graphdef, params), nnx.Intermediate, method_outputs=nnx.Intermediate)
        return nnx.to_pure_dict(record(tokens)[1])

    def arrays(params: dict) -> dict[str, np.ndarray]:
        calls = [(name.split(".__call__"), array) for name, array in named(outputs(params, probe)).items()]
        return jax.device_get(named(params) | {name[0]: array for name, array in calls if len(name) > 1})

    before, values = arrays(state.params), defaultdict(list)
    for step in range(STEPS):
        state, _ = built.train_step(state, to_devices(batches[step], built.batch_shape, built.batch_sharding))
    after = arrays(state.params)
    for name, old in before.items():
        kind, change = re.sub(r"\.\d+", "", name), after[name] - old
        values[INITIAL, kind].append(rms(old))
        values[CHANGE, kind].append(rms(change))
        if name.endswith("kernel"):
            values[NORM, kind].append(norm(change))
    return {key: rms(np.array(sizes)) for key, sizes in values.items()}


def named(tree: dict) -> dict[str, jax.Array]:
    """Return the leaves by their dotted paths."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def norm(matrix: np.ndarray) -> float:
    """Return the largest factor by which the matrix changes a vector's RMS (arXiv:2310.17813)."""
    return float(np.linalg.norm(matrix, 2) * np.sqrt(matrix.shape[0] / matrix.shape[1]))


def wrong(small: Sizes, large: Sizes, ratio: float, expected: Sizes) -> Sizes:
    """Return the exponents over a ratio of widths or depths that are not as expected."""
    exponents = {key: float(np.log(large[key] / small[key]) / np.log(ratio)) for key in expected}
    return {key: exponent for key, exponent in exponents.items() if abs(exponent - expected[key]) > 0.15}


@pytest.mark.medium
def test_sizes_scale_with_the_width_as_documented():
    """Without the factor for more outputs than inputs, `up` changes by half the sum of Muon's rates."""
    small = sizes_of(32, 2)
    assert not wrong(small, sizes_of(128, 2), 4, WIDTH)
    moved = 0.02 * sum(range(1, STEPS + 1)) / 40
    assert all(0.9 < small[NORM, name] / moved < 2.6 for name in MUON), small
