"""Test that sizes of activations and updates follow from width and depth as docs/scaling.md says."""

import sysconfig
from collections.abc import Mapping
from functools import cache

import jax
import optax
import pytest
from flax import nnx

from bench.coordinates import CHANGE, INITIAL, NORM, STEPS, Line, by_kind, draw, exponents, main, measure, sized, table
from configs.schema import UserError
from training import optimizer
from training.muon import muon

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
TOLERANCE = 0.15


@cache
def line_of(width: int, depth: int) -> Line:
    data = {"model.vocab_size": 1024, "data.source": f"{sysconfig.get_path('stdlib')}/*.py"}
    return measure(sized(width, depth, **data))


def lines_of(along: str) -> list[Line]:
    if along == "width":
        return [line_of(width, 2) for width in (64, 128, 256)]
    return [line_of(64, depth) for depth in (2, 4, 8)]


def wrong(lines: list[Line], along: str, expected: Mapping) -> dict:
    """Return the exponents that are not as expected."""
    fits = exponents(lines, along)
    return {key: fits[key] for key, exponent in expected.items() if abs(fits[key] - exponent) > TOLERANCE}


@pytest.mark.parametrize("word", ["--widths=[96]", "--picture=missing/picture.png"])
def test_what_cannot_be_measured_or_drawn_is_refused(monkeypatch, word):
    monkeypatch.setattr("sys.argv", ["bench.coordinates", word])
    with pytest.raises(UserError, match=word[2:9]):
        main()


@pytest.mark.medium
def test_sizes_scale_with_the_width_as_documented():
    assert not wrong(lines_of("width"), "width", WIDTH)


@pytest.mark.slow
def test_sizes_do_not_depend_on_the_depth(tmp_path):
    assert not wrong(lines_of("depth"), "depth", dict.fromkeys(WIDTH.keys() - {(INITIAL, "blocks")}, 0.0))
    series = {along: lines_of(along) for along in ("width", "depth")}
    assert "| norm of the change | lm_head.kernel | +0." in table(series)
    draw(series, tmp_path / "coordinates.png")
    assert (tmp_path / "coordinates.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.medium
def test_muon_changes_each_matrix_by_the_sum_of_its_rates():
    """Without the factor for more outputs than inputs, `up` changes by half as much."""
    moved = 0.02 * sum(range(1, STEPS + 1)) / 40
    sizes = by_kind(line_of(64, 2))
    assert all(0.9 < sizes[NORM, name] / moved < 2.6 for name in MUON), sizes


@pytest.mark.medium
def test_wrong_scales_are_noticed(monkeypatch):
    """Use one initial size for all widths, and scale Muon's updates by the longer side's root, too."""

    def scaled(*arguments):
        right = muon(*arguments)

        def update(updates, state, params, *, step):
            updates, state = right.update(updates, state, params, step=step)
            return jax.tree.map(lambda matrix: max(matrix.shape) ** 0.5 * matrix, updates), state

        return optax.GradientTransformationExtraArgs(right.init, update)

    monkeypatch.setattr(optimizer, "muon", scaled)
    monkeypatch.setattr(nnx.initializers, "variance_scaling", lambda *_: nnx.initializers.normal(0.02))
    noticed = wrong([line_of.__wrapped__(width, 2) for width in (64, 256)], "width", WIDTH)
    initial = {(INITIAL, name) for name in ("blocks.attention.value", "blocks.mlp.up")}
    assert initial | {(NORM, name) for name in MUON} <= set(noticed)
