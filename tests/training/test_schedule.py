"""Test rates where the schedule changes."""

import jax.numpy as jnp
import pytest

from options.schema import ScheduleConfig
from training.optimizer import make_schedule


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
