"""Test rates where the schedule changes, and what a ramp changes: rates, second moments, schedules over tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.ramp import Ramp
from configs.schema import BatchConfig, Config, GroupConfig, OptimizerConfig, ScheduleConfig, with_options
from tests.helpers import OPTIMIZER, TINY
from training.build import build, build_stages
from training.schedule import make_schedule, of_stage


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ScheduleConfig("constant"), {0: 1, 99: 1}),
        (ScheduleConfig("constant", warmup_steps=4), {0: 0.25, 1: 0.5, 3: 1, 50: 1}),
        (ScheduleConfig("warmup_cosine", 10, final=0.1), {0: 0.1, 9: 1, 10: 1, 55: 0.55, 100: 0.1}),
        (ScheduleConfig(warmup_steps=5, warmdown=0.4, final=0), {4: 1, 59: 1, 60: 1, 61: 0.975, 80: 0.5, 99: 0.025}),
        (ScheduleConfig(warmdown=1.0, final=0.5), {0: 1, 50: 0.75, 100: 0.5}),
        (ScheduleConfig(warmdown=0.0, final=0.0), {0: 1, 99: 1}),
    ],
)
def test_schedule(config, expected):
    schedule = make_schedule(config, 100)
    for step, factor in expected.items():
        assert float(schedule(jnp.array(step))) == pytest.approx(factor, abs=1e-6)


RAMP = "0:256,2048:512,5120:1024"
SCHEDULE = ScheduleConfig(warmup_steps=10, warmdown=0.5, final=0.1)
GROUP = GroupConfig(peak_rate=0.01, beta2=0.96)
COSINE = replace(SCHEDULE, kind="warmup_cosine")


def config(scaling: str = "none", schedule: ScheduleConfig = SCHEDULE, **batch) -> Config:
    batch = BatchConfig(32, 512, 1, **{"ramp": RAMP, "ramp_scaling": scaling} | batch)
    optimizer = replace(OPTIMIZER, embed=GROUP, schedule=schedule)
    return Config(name="x", steps=20, model=TINY, optimizer=optimizer, batch=batch)


def test_a_constant_batch_is_its_own_stage():
    """Its options stay as they are, so the programs stay the same."""
    constant = with_options(config("root", ramp=""), {"optimizer.matrices.kind": "muon"})
    (stage,) = Ramp.of(constant.batch).stages
    assert of_stage(constant, stage) == constant


@pytest.mark.parametrize("scaling", ["none", "root"])
def test_rates_are_a_function_of_the_tokens_seen(scaling):
    """At equal tokens, rates equal those of a run with the same tokens and steps of any size, times the rule's factor.
    The warmup, which crosses a stage border here, lasts for its steps' tokens."""
    ramp, both = Ramp.of(config().batch), [config(scaling, schedule) for schedule in (SCHEDULE, COSINE)]
    linear, cosine = (build_stages(each, jax.devices()[:1]) for each in both)
    total, warmup, embed_peak = ramp.tokens(20), ramp.tokens(10), 0.01 * (TINY.width / 768) ** -0.5
    rate_of = lambda builds, step: float(builds[ramp.index(step)].rates["embed"](jnp.int32(step)))
    for step in range(20):
        stage = ramp.stage(step)
        size, seen = stage.tokens_per_step, ramp.tokens(step)
        rise = min(1.0, (seen + size) / warmup)
        factor = {"none": 1.0, "root": (size / 512) ** 0.5}[scaling]
        fall = min(1.0, (total - seen) / (0.5 * total))
        assert rate_of(linear, step) == pytest.approx(factor * embed_peak * rise * (0.1 + 0.9 * fall), rel=1e-5)
        half = 0.5 * (1 + np.cos(np.pi * np.clip((seen - warmup) / (total - warmup), 0, 1)))
        assert rate_of(cosine, step) == pytest.approx(factor * embed_peak * rise * (0.1 + 0.9 * half), rel=1e-5)


@pytest.mark.parametrize(("scaling", "rates"), [("none", (1, 1)), ("root", (0.5**0.5, 2**0.5)), ("linear", (0.5, 2))])
def test_a_stage_s_options_follow_the_batch_that_they_are_given_for(scaling, rates):
    first, middle, last = (of_stage(config(scaling), stage) for stage in Ramp.of(config().batch).stages)
    for stage, rate, size in ((first, rates[0], 256), (middle, 1, 512), (last, rates[1], 1024)):
        assert stage.batch.tokens_per_step == size
        assert stage.optimizer.muon.peak_rate == pytest.approx(OptimizerConfig().muon.peak_rate * rate)
        half_life = lambda beta2, size: size * np.log(0.5) / np.log(beta2)
        forgets = half_life(stage.optimizer.embed.beta2, size)
        assert forgets == pytest.approx(half_life(0.96, 512 if scaling != "none" else size))
        assert stage.optimizer.embed.beta1 == GROUP.beta1


def test_second_moments_stay_unbiased_over_borders_with_skipped_steps():
    """With equal gradients, each unbiased moment is the gradient, and Adam's direction is 1."""
    ramp, builds = Ramp.of(config().batch), build_stages(config("root"), jax.devices()[:1])
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), builds[0].abstract_state.params)
    gradient, state = jax.tree.map(lambda p: jnp.full(p.shape, 0.5), params), builds[0].optimizer.init(params)
    updates = [jax.jit(built.optimizer.update) for built in builds]
    for step in range(ramp.stages[-1].step + 3):
        i = ramp.index(step)
        update, after = updates[i](gradient, state, params, step=jnp.int32(step))
        direction = -update["embed"]["table"] / builds[i].rates["embed"](jnp.int32(step))
        np.testing.assert_allclose(direction, 1, rtol=1e-3)
        if step not in [stage.step for stage in ramp.stages[1:]]:
            state = after


def test_each_stage_has_its_batch_and_all_one_state():
    builds = build_stages(config("root"), jax.devices()[:2])
    assert [built.batch_shape for built in builds] == [(4, 2, 32), (8, 2, 32), (16, 2, 32)]
    assert builds[0].abstract_state == builds[1].abstract_state == builds[2].abstract_state
    assert build(config("root"), jax.devices()[:2]).batch_shape == (16, 2, 32)
