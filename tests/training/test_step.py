"""Test that every split and mesh gives the same update, which is the reference's."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from options.schema import MeshConfig, with_options
from tests import reference
from tests.helpers import ALL_FEATURES, built_on, distance, random_rows, run_steps, start_params, tiny_config


def weights(kind: str, rows: int, length: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "ones":
        return np.ones((rows, length), np.float32)
    if kind == "lengths":  # 10% to 100% of each row
        valid = generator.integers(max(length // 10, 1), length + 1, rows)
    elif kind == "empty micro-batches":  # only the first quarter of the rows has valid tokens
        valid = np.where(np.arange(rows) < max(rows // 4, 1), generator.integers(1, length + 1, rows), 0)
    else:  # a single token
        valid = (np.arange(rows) == rows - 1).astype(int)
    return (np.arange(length) < valid[:, None]).astype(np.float32)


KINDS = ("ones", "lengths", "empty micro-batches", "single token")


def assert_same_steps(config, others, expected_by=None) -> None:
    """Take four steps with different kinds of weights. Each of `others` (config, devices) must give the update of
    `config` on one device, which must give the update of `expected_by` (the reference)."""
    start, rates = start_params(config), built_on(config, 1).rates
    rows = [random_rows(tiny_config(), step, weights(kind, 16, 16, step)) for step, kind in enumerate(KINDS)]
    whole, whole_metrics = run_steps(config, rows)
    moved = jax.tree.map(np.subtract, whole, start)
    if expected_by:
        expected, expected_metrics = expected_by(
            start, rows, config, lambda step: {name: float(rate(step)) for name, rate in rates.items()}
        )
        assert distance(whole, expected) < 1e-5
        # Compare the update itself, not only the sum.
        assert distance(moved, jax.tree.map(np.subtract, expected, start)) < 1e-3
        for kind, ours, theirs in zip(KINDS, whole_metrics, expected_metrics, strict=True):
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5), kind
    for other, devices in others:
        params, metrics = run_steps(other, rows, devices)
        assert distance(params, whole) < 1e-6, (other.mesh, other.batch)
        assert distance(jax.tree.map(np.subtract, params, start), moved) < 1e-4
        for step, (ours, theirs) in enumerate(zip(metrics, whole_metrics, strict=True)):
            assert ours["valid_tokens"] == rows[step]["weights"].sum()
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-6), (KINDS[step], other.mesh, other.batch)


def on_mesh(config, rows_per_device: int, sizes: tuple):
    options = {"batch.rows_per_device": rows_per_device, "mesh": MeshConfig(*sizes)}
    return with_options(config, options), math.prod(sizes)


ONE = (1, 1, 1)


def test_every_split_and_mesh_gives_the_reference_update():
    """Take four consecutive steps in float32: K = 1, 16 on one device, K = 2 on eight."""
    config = tiny_config()
    others = [on_mesh(config, *sizes) for sizes in ((1, ONE), (1, (8, 1, 1)))]
    assert_same_steps(config, others, reference.train)


def test_a_step_without_valid_tokens_or_with_a_gradient_that_is_not_finite_changes_nothing():
    config = tiny_config()
    good, empty = random_rows(config, 0), random_rows(config, 1, np.zeros((16, 16), np.float32))
    bad = random_rows(config, 2)
    bad["weights"][3, 3] = np.nan
    params, metrics = run_steps(config, [good, empty, bad])
    assert distance(params, run_steps(config, [good])[0]) == 0
    assert [t["skipped_steps"] for t in metrics] == [0, 1, 2]
    assert metrics[1]["loss"] == 0 and metrics[1]["valid_tokens"] == 0
    # Schedules saw three steps, since each is a function of the step. Moments saw one, so the next step is finite.
    assert metrics[0]["learning_rate"]["embed"] < metrics[1]["learning_rate"]["embed"]
    params, _ = run_steps(config, [good, empty, bad, good])
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))


def packed_and_apart(seed: int) -> tuple[dict, dict]:
    """Return rows of two documents of 5 and 11 tokens with segment ids, and each document padded in its own row."""
    packed = random_rows(tiny_config(rows=8), seed)
    segments = (np.arange(16) >= 5).astype(np.int32) * np.ones((8, 1), np.int32)
    apart = {name: np.zeros((16, 16), array.dtype) for name, array in packed.items()}
    for name, array in packed.items():
        apart[name][:8, :5], apart[name][8:, :11] = array[:, :5], array[:, 5:]
    return packed | {"segment_ids": segments}, apart


@pytest.mark.medium
def test_documents_side_by_side_give_the_update_of_documents_apart():
    config, separate = tiny_config(rows=8, rows_per_device=2, kv_heads=4), tiny_config(rows=16, kv_heads=4)
    packed, apart = zip(*(packed_and_apart(step) for step in range(3)))
    expected, expected_metrics = run_steps(separate, list(apart))
    params, metrics = run_steps(replace(config, mesh=MeshConfig(2, 2, 2)), list(packed), 8)
    assert distance(params, expected) < 1e-6
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


@pytest.mark.medium
def test_all_features_give_the_reference_update_also_on_a_mesh():
    """With four devices along `tensor` two share a key head: each computes a part, and its gradient is summed once."""
    config = tiny_config(heads=4, kv_heads=2, **ALL_FEATURES | {"depth": 3})
    assert_same_steps(config, [on_mesh(config, 4, (1, 2, 4))], reference.train)
