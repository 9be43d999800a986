"""Test that no variable of the environment changes a run's numbers."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from hosts.runtime import SETTINGS, keep_settings
from system.errors import Exit
from tests.commands import CONFIG, ROOT, assert_as_untouched, killed_after, write_folder
from tests.hosts.processes import environment_of

OTHERS = {
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 7,
    "jax_threefry_partitionable": False,
    "jax_accurate_erf_inv": True,
    "jax_enable_x64": True,
    "jax_default_matmul_precision": "bfloat16",
    "jax_allow_f16_reductions": False,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_disable_jit": True,
}
"""Another value of each setting."""
CONFIG_WITH_DROPOUT = CONFIG.replace("vocab_size=300,", "vocab_size=300, dropout=0.1,")
OPTIONS = ("--config=tiny.py", "--steps=8", "--log.every_steps=1", "--eval.every_steps=4", "--checkpoint.every_steps=4")


def start(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end in a process with these variables."""
    command = [sys.executable, str(ROOT / "train.py"), *OPTIONS, *options]
    environment = environment_of(2) | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_every_setting_that_decides_a_result_has_our_value(messages):
    assert OTHERS.keys() == SETTINGS.keys()
    here = {name: value for name, value in SETTINGS.items() if hasattr(jax.config, name)}
    try:
        for name in here:
            jax.config.update(name, OTHERS[name])
        keep_settings()
        assert {name: getattr(jax.config, name) for name in here} == here
        assert [message.partition("=")[0] for message in messages] == [name.upper() for name in here]
    finally:
        for name, value in here.items():
            jax.config.update(name, value)


@pytest.mark.medium
def test_a_run_is_the_same_in_every_environment(tmp_path):
    """With every variable set, begin a run, and continue one that was begun without them."""
    write_folder(tmp_path, CONFIG_WITH_DROPOUT)
    variables = {name.upper(): str(value) for name, value in OTHERS.items()}
    untouched = tmp_path / "untouched"
    assert start(tmp_path, "--run_dir=untouched").returncode == 0
    killed_after(4, untouched, tmp_path / "continued")
    for name in ("begun", "continued"):
        ended = start(tmp_path, f"--run_dir={name}", **variables)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert_as_untouched(tmp_path / name, untouched)


def test_flags_with_which_a_step_would_not_see_nan_are_a_mistake(tmp_path):
    write_folder(tmp_path)
    flags = "--xla_cpu_enable_fast_math=true --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
    ended = start(tmp_path, "--run_dir=fast", XLA_FLAGS=flags)
    assert ended.returncode == Exit.MISTAKE
    assert f"XLA_FLAGS={flags}: programs then take NaN for a finite number" in ended.stderr
    assert not (tmp_path / "fast").exists()
