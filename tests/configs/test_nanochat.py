"""Test that options follow from the depth unless they are given."""

import math
from dataclasses import replace

import pytest

from options.command_line import parse
from system.errors import UserError


def read(*words):
    return parse("", argv=["--config=configs/nanochat.py", *words])[0]


def test_depth_12_is_nanochat_s_reference():
    config = read("--model.depth=12")
    assert (config.model.width, config.model.heads, config.model.kv_heads) == (768, 6, 6)
    assert config.batch.tokens_per_step == 2**19 and config.model.short_window == 512
    # 12 tokens for each of 12 x 12 x 768^2 parameters of blocks, 6 gates of 12 x 6, and a head of 768 x 32768
    assert config.steps == 12 * (12 * 12 * 768**2 + 6 * 12 * 6 + 768 * 32768) // 2**19
    rates = config.optimizer
    assert (rates.embed.peak_rate, rates.lm_head.peak_rate, rates.muon.peak_rate) == (0.3, 0.008, 0.02)
    assert rates.muon.weight_decay == pytest.approx(0.28) and config.name == "nanochat-d12"


@pytest.mark.parametrize(("depth", "batch"), [(4, 2**18), (20, 2**20)])
def test_batch_rates_and_decay_follow_the_horizon(depth, batch):
    config, reference = read(f"--model.depth={depth}"), read("--model.depth=12")
    assert config.batch.tokens_per_step == batch and config.model.width % 128 == 0
    scale = math.sqrt(batch / 2**19)
    assert config.optimizer.embed.peak_rate == pytest.approx(0.3 * scale)
    assert config.optimizer.x0_lambdas.peak_rate == pytest.approx(0.5 * scale)
    assert config.optimizer.scalars.peak_rate == 0.2
    horizons = [c.steps * c.batch.tokens_per_step for c in (config, reference)]
    assert config.optimizer.muon.weight_decay == pytest.approx(0.28 * scale * horizons[1] / horizons[0], rel=0.01)


def test_given_options_stay_and_dependent_ones_follow(capsys):
    config = read("--model.depth=12", "--batch.tokens_per_step=131072", "--optimizer.muon.peak_rate=0.5", "--name=mine")
    assert config.batch.tokens_per_step == 131072 and config.optimizer.muon.peak_rate == 0.5
    assert config.steps == read("--model.depth=12").steps * 4 + 1 or config.steps == read("--model.depth=12").steps * 4
    assert config.optimizer.embed.peak_rate == pytest.approx(0.15) and config.name == "mine"
    output = capsys.readouterr().out.split("--model.width", 2)[1]
    assert "--optimizer.muon.peak_rate" not in output and "--optimizer.embed.peak_rate=0.15  nanochat's" in output
    assert read("--model.depth", "12", "--model.width", "1024").model.width == 1024


def test_a_ratio_changes_the_steps_alone():
    shorter, usual = read("--model.depth=20", "--ratio=8"), read("--model.depth=20")
    assert shorter.steps == usual.steps * 8 // 12 and replace(shorter, steps=usual.steps, ratio=12) == usual
    for words in (["--config=configs/nanochat.py", "--steps=9"], ["--config=configs/small.py"]):
        with pytest.raises(UserError, match="--ratio gives the steps"):
            parse("", argv=[*words, "--ratio=8"])


def test_options_may_have_hyphens_and_bad_ones_are_refused():
    assert read("--model.depth=12", "--batch.tokens-per-step=4096").batch.tokens_per_step == 4096
    for word, message in (("--model.depth=0", "model.depth=0 cannot"), ("--model.kv_heads=4", "divide model.heads=10")):
        with pytest.raises(UserError, match=message):
            read(word)
