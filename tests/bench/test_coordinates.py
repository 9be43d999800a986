"""Test that sizes of activations and updates follow from width and depth as docs/scaling.md says."""

import sysconfig
from collections.abc import Mapping
from functools import cache

import pytest

from bench.coordinates import CHANGE, INITIAL, NORM, STEPS, Line, by_kind, exponents, measure, sized, table

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


@cache
def line_of(width: int, depth: int) -> Line:
    data = {"model.vocab_size": 1024, "data.source": f"{sysconfig.get_path('stdlib')}/*.py"}
    return measure(sized(width, depth, **data))


def wrong(lines: list[Line], along: str, expected: Mapping) -> dict:
    """Return the exponents that are not as expected."""
    fits = exponents(lines, along)
    return {key: fits[key] for key, exponent in expected.items() if abs(fits[key] - exponent) > 0.15}


@pytest.mark.medium
def test_sizes_scale_with_the_width_as_documented():
    """Without the factor for more outputs than inputs, `up` changes by half the sum of Muon's rates."""
    lines = [line_of(width, 2) for width in (64, 256)]
    assert not wrong(lines, "width", WIDTH)
    moved, sizes = 0.02 * sum(range(1, STEPS + 1)) / 40, by_kind(lines[0])
    assert all(0.9 < sizes[NORM, name] / moved < 2.6 for name in MUON), sizes
    assert "| norm of the change | lm_head.kernel | +0." in table({"width": lines})


@pytest.mark.slow
def test_sizes_do_not_depend_on_the_depth():
    lines = [line_of(64, 2), line_of(64, 8)]
    assert not wrong(lines, "depth", dict.fromkeys(WIDTH.keys() - {(INITIAL, "blocks")}, 0.0))
