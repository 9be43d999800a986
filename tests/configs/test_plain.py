"""Test the plain network: nanochat's sizes at any depth, and the small baseline without it."""

import pytest

from configs.plain import get_config
from model.gpt import parameter_counts
from options.command_line import parse
from options.schema import Config, OptimizerConfig, options


@pytest.mark.parametrize(("depth", "width", "steps", "millions"), [(12, 768, 2520, 135), (20, 1280, 9960, 477)])
def test_at_a_depth_it_has_nanochat_s_sizes(depth, width, steps, millions):
    config, _ = parse("", argv=["--config=configs/plain.py", f"--model.depth={depth}"])
    expected = options(Config(name=f"plain-d{depth}", steps=steps, run_dir=f"runs/plain-d{depth}"))
    heads = width // 128
    expected |= {"model.depth": depth, "model.width": width, "model.heads": heads, "model.kv_heads": heads}
    assert options(config) == expected | {"model.short_window": 512}
    assert config.optimizer == OptimizerConfig()
    assert round(sum(parameter_counts(config.model).values()) / 1e6) == millions


def test_options_on_the_command_line_stay_and_without_a_depth_it_is_small():
    words = ["--model.depth=2", "--model.width=64", "--batch.tokens_per_step=4096", "--deterministic=False"]
    config, _ = parse("", argv=["--config=configs/plain.py", *words, "--steps=7", "--name=mine"])
    given = (config.model.width, config.batch.tokens_per_step, config.deterministic, config.steps, config.name)
    assert given == (64, 4096, False, 7, "mine")
    small, _ = parse("", argv=["--config=configs/plain.py", "--steps=9"])
    assert small.model.width == get_config().model.width and small.steps == 9
