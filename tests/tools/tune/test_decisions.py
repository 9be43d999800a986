"""Test the decisions of the stages from given numbers, without training."""

import math
from dataclasses import replace

import jax
import pytest

from configs.schema import MeshConfig, OptimizerConfig, options
from tests.helpers import tiny_config
from tools.tune import branch, fit, noise, rate, timing
from tools.tune.fit import Candidate, frontier, kinds, meshes, named
from tools.tune.statistics import slowdowns
from tools.tune.timing import MIN_ROUNDS, _left, chosen
from training.schedule import with_batch, with_rates, with_steps


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [
        # Everything fits: the largest share needs no recomputation, so none is tried.
        (lambda c: True, ["8-none-4", "4-none-4", "16-none-4", "32-none-4", "32-none-1"]),
        # Recomputation is tried from the last fitting size of the previous level.
        (
            lambda c: c.rows <= {"none": 8, "products": 16, "block": 32}[c.remat] // (2 if c.loss_chunks == 1 else 1),
            [
                *("8-none-4", "4-none-4", "16-none-4", "8-none-1", "4-none-1"),
                *("4-products-4", "8-products-4", "16-products-4", "32-products-4", "16-products-1", "8-products-1"),
                *("8-block-4", "16-block-4", "32-block-4", "32-block-1", "16-block-1"),
            ],
        ),
        # Nothing fits.
        (
            lambda c: False,
            [
                *("8-none-4", "4-none-4", "2-none-4", "1-none-4", "1-none-1"),
                *("1-products-4", "1-products-1", "1-block-4", "1-block-1"),
            ],
        ),
    ],
)
def test_the_frontier_is_found_with_few_programs(fitting, expected):
    asked = []
    levels = [[(remat, 4), (remat, 1)] for remat in ("none", "products", "block")]
    frontier(levels, [1], 8, 32, lambda c: asked.append(c.name) or fitting(c))
    assert asked == [f"{name}-1" for name in expected]
    assert [named(name).name for name in asked] == asked


def test_a_mesh_that_sends_more_is_tried_only_if_others_lack_memory():
    asked = set()
    needs = lambda c: asked.add(c.fsdp) or c.rows * {"none": 4, "block": 1}[c.remat] <= 16 * c.fsdp
    frontier([[("none", 1)], [("block", 1)]], [1, 2, 4, 8], 8, 16, needs)
    assert asked == {1, 2, 4}  # fsdp=1 fits 16 rows too, but recomputes


def test_meshes_are_those_that_divide_devices_and_network(monkeypatch):
    config = tiny_config(rows=64, rows_per_device=1)
    assert meshes(config, jax.devices()) == [1, 2, 4, 8]
    assert meshes(replace(config, mesh=MeshConfig(tensor=2)), jax.devices()) == [1, 2, 4]
    assert meshes(replace(config, mesh=MeshConfig(data=2, fsdp=4)), jax.devices()) == [4]
    assert meshes(config, jax.devices()[:1]) == [1]
    monkeypatch.setattr(fit, "islands", lambda devices: [devices[:4], devices[4:]])
    assert meshes(config, jax.devices()) == [1, 2, 4]


def test_timing_ends_when_it_costs_more_than_it_can_save():
    alike = {"a": [1.0, 1.1, 1.0, 1.1], "b": [1.05, 1.0, 1.05, 1.0]}
    assert timing.at_stake({name: seconds[:3] for name, seconds in alike.items()}) == math.inf
    assert timing.at_stake(alike) == pytest.approx(max(abs(end) for end in slowdowns(alike)["a"][1:]))


def test_kinds_start_at_the_config_s_recomputation():
    assert kinds(tiny_config(remat="products")) == [[("products", 1), ("products", 8)], [("block", 1), ("block", 8)]]
    assert kinds(tiny_config(loss_chunks=4, remat="block")) == [[("block", 4), ("block", 1)]]
    assert kinds(tiny_config(length=10))[0] == [("none", 1)]  # 8 chunks do not divide them


def test_those_with_the_least_recomputation_and_the_most_rows_are_timed():
    fitting = [Candidate(4, "none", 1), Candidate(16, "block", 1), Candidate(8, "none", 4), Candidate(8, "none", 1)]
    assert [c.name for c in chosen(fitting)] == ["8-none-1-1", "8-none-4-1", "4-none-1-1", "16-block-1-1"]


@pytest.mark.parametrize(
    ("seconds", "left", "alike"),
    [
        ({"a": [1.0] * 3, "b": [9.0] * 3}, ["a", "b"], False),  # too few rounds
        ({"a": [1.0] * MIN_ROUNDS, "b": [1.5, 1.6, 1.5, 1.6]}, ["a"], True),
        ({"a": [1.0] * MIN_ROUNDS, "b": [0.8, 1.3, 0.9, 1.2]}, ["a", "b"], False),
        ({"a": [1.0] * MIN_ROUNDS, "b": [1.001, 0.999, 1.001, 1.0]}, ["a", "b"], True),
        ({"a": [1.0] * 6, "b": [1.2, 0.9, 1.1, 1.0, 0.9, 1.0], "dropped": [2.0] * 4}, ["a", "b"], False),
    ],
)
def test_timing_continues_until_intervals_separate(seconds, left, alike):
    assert _left(seconds) == (left, alike)


@pytest.mark.parametrize(
    ("steps", "expected"), [(300, [8, 16, 32]), (100_000, [1000, 2000, 5000, 10_000]), (50, [8]), (4, [])]
)
def test_noise_is_read_at_the_shares_at_which_a_larger_batch_can_start(steps, expected):
    assert noise.points(steps) == expected


@pytest.mark.parametrize(
    ("share", "rows", "replicas", "expected"), [(16, 8, 1, 2), (16, 1, 1, 1), (2, 2, 8, 2), (4, 4, 1, 1), (6, 6, 1, 3)]
)
def test_a_step_has_enough_units(share, rows, replicas, expected):
    assert noise.units_of(share, rows, replicas) == expected


def test_noise_is_of_the_later_half_of_the_measured_steps():
    line = lambda step, noise: {"step": step, "diagnostics": {"signal": {"all": 1.0}, "noise": {"all": noise}}}
    lines = [line(step, 100.0 if step > 16 else 5.0) for step in range(1, 33)]
    assert noise.read(lines, 32).value == pytest.approx(100) and noise.read(lines, 16).value == pytest.approx(5)
    assert noise.read(lines, 7) is None


@pytest.mark.parametrize(
    ("low", "high", "expected", "says"),
    [
        (900, 1500, {}, "the config's 4,096 is above it there, and stays"),
        (3000, 9000, {}, "is within its interval"),
        (5000, math.inf, {}, "B is at least 5,000 tokens"),
        (2000, "inf", {}, "B is at least 2,000 tokens"),  # tune.json writes infinity so
    ],
)
def test_noise_of_the_run_s_beginning_changes_no_batch(low, high, expected, says):
    decision = noise.decision(
        {8: {"value": 1, "low": 1, "high": 2}, 32: {"value": low, "low": low, "high": high}}, 4096, 300
    )
    assert decision.options == expected and says in decision.says and decision.kind == "extrapolated"
    assert noise.decision({}, 4096, 300).kind == "not done"


@pytest.mark.parametrize(
    ("losses", "more"),
    [
        ({0.5: [3.0], 1.0: [2.0], 2.0: [3.0]}, []),
        ({1.0: [3.0], 2.0: [2.0]}, [4.0]),
        ({0.25: [1.0], 1.0: [3.0]}, [0.125]),
        ({1.0: [3.0], 16.0: [2.0]}, []),
        ({1.0: [math.inf], 2.0: [math.inf]}, []),
    ],
)
def test_the_grid_grows_if_its_edge_is_best(losses, more):
    assert rate.beyond(losses) == more


def test_the_first_rung_is_what_the_budget_allows():
    assert rate.first_rung(10_000, 4096, math.inf, 0) == 250
    assert rate.first_rung(10_000, 4096, 19 * 100 * 4096.0, 0) == 100
    assert rate.first_rung(100, 4096, math.inf, 0) == rate.MIN_STEPS


def test_a_rate_of_shorter_runs_is_extrapolated_and_warned_of():
    losses = {0.5: [3.2, 3.3], 1.0: [3.1, 3.2], 2.0: [3.0, 3.1]}
    decision = rate.decision([(16, losses), (32, {1.0: [3.0, 3.1], 2.0: [2.9, 3.0]})], 400)
    assert decision.options == {"rate": 2.0} and decision.kind == "extrapolated"
    assert "x2 at 16 steps, x2 at 32 steps; a short horizon favours high rates" in decision.says
    assert rate.decision([(400, losses)], 400).kind == "measured"
    assert rate.decision([], 400).kind == "not done" == rate.decision([(16, {1.0: [math.inf]})], 400).kind


def test_the_better_rule_at_the_critical_batch_is_taken():
    losses = {
        **{(1.0, "root"): [3.0, 3.0], (2.0, "root"): [3.005, 3.005], (4.0, "root"): [3.2, 3.2]},
        **{(2.0, "linear"): [2.999, 2.999], (4.0, "linear"): [math.inf] * 2},
    }
    decision = branch.decision(losses, 4096, 0.1, {"value": 8000.0})
    assert decision.options == {"batch": 2.0, "rule": "linear"}
    assert (
        "a batch of 8,192 tokens (x2)" in decision.says
        and "the noise scale after as many steps was 8,000" in decision.says
    )
    assert branch.decision({(1.0, "root"): [3.0]}, 4096, 0.1, {}).kind == "not done"
    smaller = branch.decision({(0.5, "root"): [3.0, 3.0], (1.0, "root"): [3.1, 3.1]}, 4096, 0.01, {})
    assert smaller.options == {} and "a batch of 2,048 tokens (x0.5)" in smaller.says and "stays" in smaller.says


def test_a_larger_batch_has_the_same_tokens_in_fewer_steps():
    config = replace(tiny_config(rows=16), steps=400, optimizer=OptimizerConfig())
    before = options(config)
    for rule, factor in (("root", 2.0), ("linear", 4.0)):
        after = options(with_batch(config, 4.0, rule))
        assert after["batch.tokens_per_step"] == 4 * before["batch.tokens_per_step"] and after["steps"] == 100
        for name in before:
            if name.endswith("peak_rate"):
                assert after[name] == factor * before[name]
            elif name.endswith(".beta2"):
                assert after[name] == pytest.approx(before[name] ** 4)
            elif name == "optimizer.muon.momentum_warmup_steps":
                assert after[name] == before[name] / 4
            elif name not in ("steps", "batch.tokens_per_step"):
                assert after[name] == before[name], name
    assert with_batch(config, 1.0, "linear") == config


def test_rates_and_steps_change_alone():
    config = tiny_config()
    changed = lambda other: {name for name, value in options(other).items() if value != options(config)[name]}
    assert all(name.endswith("peak_rate") for name in changed(with_rates(config, 2.0)))
    assert changed(with_steps(config, 16)) == {"steps"} | {
        name for name in options(config) if name.endswith("warmup_steps") and options(config)[name]
    }
