"""Test which steps are traced."""

import jax
import pytest

from configs.schema import ProfileConfig
from run.hooks.profile import Profile
from tests.run.hooks.runs import NOTHING, config_of, progress


@pytest.mark.parametrize(
    ("steps", "resumed", "process", "traced", "says"),
    [
        ("", 0, 0, [], []),
        ("10:15", 0, 0, ["from 9", "to 15"], []),
        ("10:15", 9, 0, ["from 9", "to 15"], []),
        ("38:50", 0, 0, ["from 37", "to 40"], []),  # the part of the range within the run
        ("10:15", 0, 1, [], []),
        ("2:15", 2, 0, [], ["--profile.steps=2:15: step 2 is done already; nothing is traced"]),
    ],
)
def test_the_steps_asked_for_are_traced_into_the_run_s_folder(
    tmp_path, monkeypatch, messages, steps, resumed, process, traced, says
):
    config, seen = config_of(tmp_path, profile=ProfileConfig(steps)), []
    run, hook = progress(config, resumed), Profile(config)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    starts = lambda folder: seen.append(f"from {run.step}") or folder == tmp_path / "profile" or pytest.fail(folder)
    monkeypatch.setattr(jax.profiler, "start_trace", starts)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append(f"to {run.step}"))
    hook.begin(run)
    while run.step < config.steps:
        hook.before_step(run)
        run.step += 1
        hook.after_step(run, {}, NOTHING)  # pyright: ignore
    hook.close()
    assert seen == traced and messages == says
