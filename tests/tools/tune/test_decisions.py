"""Test the decisions of the stages, and the statistics that they rest on, from given numbers, without training."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from configs.schema import MeshConfig, OptimizerConfig, options
from tests.helpers import tiny_config
from tools.tune import learning, speed
from tools.tune.learning import with_batch, with_steps
from tools.tune.speed import MIN_ROUNDS, at_stake, frontier, kinds, meshes
from tools.tune.statistics import better_half, critical_batch, difference, lowest_of_the_best, mean, slowdowns
from training.schedule import with_rates


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
    ],
)
def test_the_frontier_is_found_with_few_programs(fitting, expected):
    asked = []
    levels = [[(remat, 4), (remat, 1)] for remat in ("none", "products", "block")]
    frontier(levels, [1], 8, 32, lambda c: asked.append(c.name) or fitting(c))
    assert asked == [f"{name}-1" for name in expected]


def test_a_mesh_that_sends_more_is_tried_only_if_others_lack_memory():
    asked = set()
    needs = lambda c: asked.add(c.fsdp) or c.rows * {"none": 4, "block": 1}[c.remat] <= 16 * c.fsdp
    frontier([[("none", 1)], [("block", 1)]], [1, 2, 4, 8], 8, 16, needs)
    assert asked == {1, 2, 4}  # fsdp=1 fits 16 rows too, but recomputes


def test_candidates_divide_devices_and_network_and_start_at_the_config_s_recomputation(monkeypatch):
    config = tiny_config(rows=64, rows_per_device=1)
    assert meshes(replace(config, mesh=MeshConfig(data=2, fsdp=4)), jax.devices()) == [4]
    monkeypatch.setattr(speed, "islands", lambda devices: [devices[:4], devices[4:]])
    assert meshes(replace(config, mesh=MeshConfig(tensor=2)), jax.devices()) == [1, 2]
    assert kinds(tiny_config(remat="products")) == [[("products", 1), ("products", 8)], [("block", 1), ("block", 8)]]
    assert kinds(tiny_config(loss_chunks=4, remat="block")) == [[("block", 4), ("block", 1)]]
    assert kinds(tiny_config(length=10))[0] == [("none", 1)]  # 8 chunks do not divide them


@pytest.mark.parametrize(
    ("seconds", "left", "alike"),
    [
        ({"a": [1.0] * 3, "b": [9.0] * 3}, ["a", "b"], False),  # too few rounds
        ({"a": [1.0] * MIN_ROUNDS, "b": [1.5, 1.6, 1.5, 1.6]}, ["a"], True),
        ({"a": [1.0] * MIN_ROUNDS, "b": [1.001, 0.999, 1.001, 1.0]}, ["a", "b"], True),
        ({"a": [1.0] * 6, "b": [1.2, 0.9, 1.1, 1.0, 0.9, 1.0], "dropped": [2.0] * 4}, ["a", "b"], False),
    ],
)
def test_timing_continues_until_intervals_separate(seconds, left, alike):
    assert speed._left(seconds) == (left, alike)


def test_timing_ends_when_it_costs_more_than_it_can_save():
    alike = {"a": [1.0, 1.1, 1.0, 1.1], "b": [1.05, 1.0, 1.05, 1.0]}
    assert at_stake({name: seconds[:3] for name, seconds in alike.items()}) == math.inf
    assert at_stake(alike) == pytest.approx(max(abs(end) for end in slowdowns(alike)["a"][1:]))


def test_noise_is_read_at_shares_at_which_a_larger_batch_can_start_in_enough_units_of_the_later_steps():
    assert [learning.points(steps) for steps in (300, 50, 4)] == [[8, 16, 32], [8], []]
    assert [learning.units_of(*of) for of in ((16, 8, 1), (2, 2, 8), (4, 4, 1), (6, 6, 1))] == [2, 2, 1, 3]
    line = lambda step, noise: {"step": step, "diagnostics": {"signal": {"all": 1.0}, "noise": {"all": noise}}}
    lines = [line(step, 100.0 if step > 16 else 5.0) for step in range(1, 33)]
    assert [learning.read(lines, step).value for step in (32, 16)] == pytest.approx([100, 5])
    assert learning.read(lines, 7) is None


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (900, 1500, "the config's 4,096 is above it there, and stays"),
        (3000, 9000, "is within its interval"),
        (5000, "inf", "B is at least 5,000 tokens"),  # tune.json writes infinity so
    ],
)
def test_noise_of_the_run_s_beginning_changes_no_batch(low, high, says):
    early, late = {"value": 1, "low": 1, "high": 2}, {"value": low, "low": low, "high": high}
    decision = learning.noise_decision({8: early, 32: late}, 4096, 300)
    assert decision.options == {} and says in decision.says and decision.kind == "extrapolated"


def test_the_grid_grows_if_its_edge_is_best_and_the_first_rung_is_what_the_budget_allows():
    assert learning.beyond({0.5: [3.0], 1.0: [2.0], 2.0: [3.0]}) == learning.beyond({1.0: [3.0], 16.0: [2.0]}) == []
    assert learning.beyond({1.0: [3.0], 2.0: [2.0]}) == [4.0] and learning.beyond({0.25: [1.0], 1.0: [3.0]}) == [0.125]
    assert learning.beyond({1.0: [math.inf], 2.0: [math.inf]}) == []
    assert learning.first_rung(10_000, 4096, math.inf, 0) == 250
    assert learning.first_rung(10_000, 4096, 19 * 100 * 4096.0, 0) == 100
    assert learning.first_rung(100, 4096, math.inf, 0) == learning.MIN_STEPS


def test_a_rate_of_shorter_runs_is_extrapolated_and_warned_of():
    losses = {0.5: [3.2, 3.3], 1.0: [3.1, 3.2], 2.0: [3.0, 3.1]}
    decision = learning.rate_decision([(16, losses), (32, {1.0: [3.0, 3.1], 2.0: [2.9, 3.0]})], 400)
    assert decision.options == {"rate": 2.0} and decision.kind == "extrapolated"
    assert "x2 at 16 steps, x2 at 32 steps; a short horizon favours high rates" in decision.says
    assert learning.rate_decision([(400, losses)], 400).kind == "measured"
    assert learning.rate_decision([(16, {1.0: [math.inf]})], 400).kind == "not done"


def test_the_better_rule_at_the_critical_batch_is_taken_and_a_smaller_batch_is_not():
    losses = {
        **{(1.0, "root"): [3.0, 3.0], (2.0, "root"): [3.005, 3.005], (4.0, "root"): [3.2, 3.2]},
        **{(2.0, "linear"): [2.999, 2.999], (4.0, "linear"): [math.inf] * 2},
    }
    decision = learning.branch_decision(losses, 4096, 0.1, {"value": 8000.0})
    assert decision.options == {"batch": 2.0, "rule": "linear"} and "a batch of 8,192 tokens (x2)" in decision.says
    assert "the noise scale after as many steps was 8,000" in decision.says
    assert learning.branch_decision({(1.0, "root"): [3.0]}, 4096, 0.1, {}).kind == "not done"
    smaller = learning.branch_decision({(0.5, "root"): [3.0, 3.0], (1.0, "root"): [3.1, 3.1]}, 4096, 0.01, {})
    assert smaller.options == {} and "a batch of 2,048 tokens (x0.5)" in smaller.says and "stays" in smaller.says


def test_rates_steps_and_batch_change_with_what_follows_from_them_alone():
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
    changed = lambda other: {name for name, value in options(other).items() if value != before[name]}
    assert all(name.endswith("peak_rate") for name in changed(with_rates(config, 2.0)))
    warmups = {name for name in before if name.endswith("warmup_steps") and before[name]}
    assert changed(with_steps(config, 16)) == {"steps"} | warmups


def test_an_interval_is_student_s_and_of_pairs():
    value, low, high = mean([1.0, 2.0, 3.0, 4.0])
    assert value == 2.5 and high - 2.5 == pytest.approx(2.5 - low) == pytest.approx(3.182446 * 1.290994 / 2)
    assert mean([2.0]) == (2.0, -math.inf, math.inf) and mean([1.0, math.inf]) == (math.inf,) * 3  # a failed run loses
    texts = np.random.default_rng(0).normal(4.0, 1.0, 32)  # shared noise cancels
    more = difference(list(texts + 0.01), list(texts))
    assert more.value == pytest.approx(0.01) and more.high - more.low < 1e-6


def test_a_slow_minute_is_in_no_slowdown_and_dropped_ones_keep_their_rounds():
    machine = [1.0, 1.1, 5.0, 1.0]
    result = slowdowns({"a": machine, "b": [1.2 * s for s in machine], "dropped": [2.0, 2.2]})
    assert result["a"] == (0, 0, 0)
    assert result["b"].low == pytest.approx(0.2) == pytest.approx(result["b"].high)
    assert result["dropped"].value == pytest.approx(1.0)


def test_the_better_half_is_kept_and_a_tie_goes_to_the_lower_rate():
    assert better_half({0.5: [3.0], 1: [1.0], 2: [2.0], 4: [math.inf], 0.25: [4.0]}) == [1, 2, 0.5]
    assert better_half({1: [math.inf], 2: [math.nan]}) == []
    even, odd = [3.0, 3.2, 3.1, 3.3], [3.01, 3.18, 3.12, 3.28]  # means differ by 0.0025
    assert lowest_of_the_best({1.0: odd, 2.0: even, 4.0: [4.0] * 4})[0] == 1.0
    assert lowest_of_the_best({1.0: [x + 1 for x in even], 2.0: even})[0] == 2.0
    assert lowest_of_the_best({0.5: [math.inf] * 4, 2.0: even})[0] == 2.0


@pytest.mark.parametrize(
    ("means", "critical"),
    [
        ({"0.5 root": 3.0, "1 root": 3.005, "2 root": 3.009, "4 root": 3.1}, "2 root"),
        ({"0.5 root": 3.2, "1 root": 3.1, "2 root": 3.05, "4 root": 3.0}, "4 root"),
        ({"1 root": 3.0, "4 root": math.inf, "4 linear": math.inf}, "1 root"),
        ({"1 root": 3.0, "2 root": 3.007, "2 linear": 3.004}, "2 linear"),
        # A batch that is level only under the rule that is always worse is no critical batch.
        ({"1 root": 3.0, "2 root": 3.3, "4 linear": 3.3, "0.5 linear": 3.3}, "1 root"),
    ],
)
def test_the_critical_batch_is_the_largest_that_loses_next_to_nothing(means, critical):
    key = lambda text: (float(text.split()[0]), text.split()[1])
    losses = {key(text): [loss, loss] for text, loss in means.items()}
    assert critical_batch(losses, 0.01)[0] == key(critical)
