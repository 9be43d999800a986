"""The step: the same update whatever the split and the number of devices, and exactly the reference's."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import MatricesConfig, MeshConfig, MuonConfig
from tests import reference
from tests.helpers import (
    ALL_FEATURES,
    OPTIMIZER,
    SCHEDULE,
    distance,
    random_rows,
    run_steps,
    start_params,
    step_of,
    tiny_config,
)


def with_rows_per_device(config, rows_per_device):
    return replace(config, batch=replace(config.batch, rows_per_device=rows_per_device))


def weights(kind: str, rows: int, length: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "ones":
        return np.ones((rows, length), np.float32)
    if kind == "lengths":  # 10% to 100% of each row
        valid = generator.integers(max(length // 10, 1), length + 1, rows)
    elif kind == "empty micro-batches":  # only the first quarter of the rows has any
        valid = np.where(np.arange(rows) < max(rows // 4, 1), generator.integers(1, length + 1, rows), 0)
    else:  # one single token
        valid = (np.arange(rows) == rows - 1).astype(int)
    return (np.arange(length) < valid[:, None]).astype(np.float32)


KINDS = ("ones", "lengths", "empty micro-batches", "single token")


@pytest.mark.parametrize("kind", KINDS)
def test_every_split_and_mesh_gives_the_reference_update(kind):
    """Three consecutive steps in float32: K = 1, 2, 4, 16 on one device, K = 1, 2 on eight."""
    config = tiny_config()
    rows = [random_rows(config, step, weights(kind, 16, 16, step)) for step in range(3)]
    start, rates = start_params(config), step_of(config, 1)[3]
    expected, expected_told = reference.train(
        start, rows, config, lambda step: {name: float(rate(step)) for name, rate in rates.items()}
    )
    whole, whole_told = run_steps(config, rows)
    assert distance(whole, expected) < 1e-5
    moved = jax.tree.map(np.subtract, whole, start)
    assert distance(moved, jax.tree.map(np.subtract, expected, start)) < 1e-3  # the update itself, not just the sum
    for rows_per_device, devices in ((8, 1), (4, 1), (1, 1), (2, 8), (1, 8)):
        params, told = run_steps(with_rows_per_device(config, rows_per_device), rows, devices)
        assert distance(params, whole) < 1e-6
        for step in range(3):
            for name in ("loss", "grad_norm"):
                assert told[step][name] == pytest.approx(whole_told[step][name], rel=1e-6)
                assert told[step][name] == pytest.approx(expected_told[step][name], rel=1e-5)
            assert told[step]["valid_tokens"] == rows[step]["weights"].sum()


FACTORIZATIONS = [(d, f, 8 // d // f) for d in (1, 2, 4, 8) for f in (1, 2, 4, 8) if d * f <= 8]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", FACTORIZATIONS, ids=str)
def test_every_mesh_of_eight_gives_the_update_of_one(sizes):
    """Three steps with each kind of weights, through micro-batches, in float32."""
    config = tiny_config(rows=16, heads=8, kv_heads=8, head_dim=8)
    divided = replace(with_rows_per_device(config, 1), mesh=MeshConfig(*sizes))
    start = start_params(config)
    for kind in KINDS:
        rows = [random_rows(config, step, weights(kind, 16, 16, step)) for step in range(3)]
        whole, whole_told = run_steps(config, rows)
        params, told = run_steps(divided, rows, 8)
        assert distance(params, whole) < 1e-6
        moved = [jax.tree.map(np.subtract, p, start) for p in (params, whole)]
        assert distance(*moved) < 1e-4
        for ours, theirs in zip(told, whole_told, strict=True):
            assert ours["valid_tokens"] == theirs["valid_tokens"]
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-6)


@settings(max_examples=8)
@given(
    rows=st.sampled_from([2, 4, 6, 12]),
    length=st.sampled_from([1, 5, 16]),
    kv_heads=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_any_split_equals_no_split(rows, length, kv_heads, kind, data):
    config = tiny_config(rows, rows, length, depth=1, kv_heads=kv_heads)
    part = data.draw(st.sampled_from([n for n in range(1, rows) if rows % n == 0]), label="rows of a micro-batch")
    batches = [random_rows(config, step, weights(kind, rows, length, step)) for step in range(2)]
    whole, _ = run_steps(config, batches)
    split, _ = run_steps(with_rows_per_device(config, part), batches)
    assert distance(split, whole) < 1e-6


def test_bfloat16_split_stays_close():
    config = tiny_config(dtype="bfloat16")
    rows = [random_rows(config, step, weights("lengths", 16, 16, step)) for step in range(3)]
    whole, _ = run_steps(config, rows)
    split, _ = run_steps(with_rows_per_device(config, 2), rows)
    exact, _ = run_steps(replace(config, model=replace(config.model, dtype="float32")), rows)
    assert distance(split, whole) < 2e-2
    assert distance(whole, exact) < 2e-2


def test_mean_of_means_would_fail():
    """The rows of the tests above do tell sums from means: averaging micro-batches' means gives another update."""
    config = tiny_config()
    batch = random_rows(config, 0, weights("lengths", 16, 16))
    start = start_params(config)
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(reference.mean_loss), static_argnums=2)
        exact = gradient(start, batch, config.model)
        parts = [{name: array[i : i + 4] for name, array in batch.items()} for i in range(0, 16, 4)]
        means = [gradient(start, part, config.model) for part in parts]
        assert distance(jax.tree.map(lambda *g: sum(g) / 4, *means), exact) > 1e-2


def test_step_without_valid_tokens_changes_nothing():
    config = tiny_config()
    good, empty = random_rows(config, 0), random_rows(config, 1, np.zeros((16, 16), np.float32))
    params, told = run_steps(config, [good, empty])
    expected, _ = run_steps(config, [good])
    assert distance(params, expected) == 0
    assert [t["skipped_steps"] for t in told] == [0, 1]
    assert told[1]["loss"] == 0 and told[1]["valid_tokens"] == 0


def test_step_with_a_gradient_that_is_not_finite_changes_nothing():
    config = tiny_config()
    good, bad = random_rows(config, 0), random_rows(config, 1)
    bad["weights"][3, 3] = np.nan
    params, told = run_steps(config, [good, bad, good])
    # The moments and bias corrections saw two steps; the schedules three, since each is a function of the step.
    assert [t["skipped_steps"] for t in told] == [0, 1, 1]
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))
    assert told[0]["learning_rate"]["embed"] < told[1]["learning_rate"]["embed"]
    only, _ = run_steps(config, [good, bad])
    assert distance(only, run_steps(config, [good])[0]) == 0


def packed_and_apart(seed: int) -> tuple[dict, dict]:
    """Rows of two documents of 5 and 11 tokens, with segment ids; and each document in a row of its own, padded."""
    packed = random_rows(tiny_config(rows=8), seed)
    segments = (np.arange(16) >= 5).astype(np.int32) * np.ones((8, 1), np.int32)
    apart = {name: np.zeros((16, 16), array.dtype) for name, array in packed.items()}
    for name, array in packed.items():
        apart[name][:8, :5], apart[name][8:, :11] = array[:, :5], array[:, 5:]
    return packed | {"segment_ids": segments}, apart


@pytest.mark.parametrize(("sizes", "devices"), [((1, 1, 1), 1), ((2, 2, 2), 8)])
def test_documents_side_by_side_give_the_update_of_documents_apart(sizes, devices):
    config, separate = tiny_config(rows=8, rows_per_device=2, kv_heads=4), tiny_config(rows=16, kv_heads=4)
    packed, apart = zip(*(packed_and_apart(step) for step in range(3)))
    expected, expected_told = run_steps(separate, list(apart))
    params, told = run_steps(replace(config, mesh=MeshConfig(*sizes)), list(packed), devices)
    assert distance(params, expected) < 1e-6
    for ours, theirs in zip(told, expected_told, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    without = [{name: array for name, array in rows.items() if name != "segment_ids"} for rows in packed]
    assert distance(run_steps(config, without)[0], expected) > 1e-4


MUON = {"optimizer": replace(OPTIMIZER, matrices=MatricesConfig(0.01, kind="muon"), muon=MuonConfig(schedule=SCHEDULE))}


@pytest.mark.parametrize("kind", KINDS)
def test_all_features_give_the_reference_update_whatever_the_split_and_mesh(kind):
    config = tiny_config(heads=4, kv_heads=4, **ALL_FEATURES)
    rows = [random_rows(config, step, weights(kind, 16, 16, step)) for step in range(3)]
    start, rates = start_params(config), step_of(config, 1)[3]
    expected, _ = reference.train(
        start, rows, config, lambda step: {name: float(rate(step)) for name, rate in rates.items()}
    )
    whole, whole_told = run_steps(config, rows)
    assert distance(whole, expected) < 1e-5
    for rows_per_device, sizes in ((4, (1, 1, 1)), (1, (8, 1, 1)), (2, (2, 2, 2)), (4, (1, 2, 4))):
        divided = replace(with_rows_per_device(config, rows_per_device), mesh=MeshConfig(*sizes))
        params, told = run_steps(divided, rows, math.prod(sizes))
        assert distance(params, whole) < 1e-6
        for ours, theirs in zip(told, whole_told, strict=True):
            for name in ("loss", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-6)


def test_muon_s_update_is_the_same_whatever_the_split_and_mesh():
    config = replace(tiny_config(heads=4, kv_heads=4, **ALL_FEATURES), **MUON)
    rows = [random_rows(config, step, weights("lengths", 16, 16, step)) for step in range(3)]
    whole, _ = run_steps(config, rows)
    for rows_per_device, sizes in ((4, (1, 1, 1)), (1, (8, 1, 1)), (2, (2, 2, 2))):
        divided = replace(with_rows_per_device(config, rows_per_device), mesh=MeshConfig(*sizes))
        params, _ = run_steps(divided, rows, math.prod(sizes))
        assert distance(params, whole) < 1e-6, sizes
