"""Test the size of each step of a ramp, and the tokens before a step."""

import pytest

from configs.ramp import Ramp, Stage, with_ramp_spelled_out
from configs.schema import BatchConfig, Config, UserError

RAMP = Ramp.read("0:256,2e3:512,5000:1024", 1)


def test_a_stage_begins_with_the_first_step_after_its_tokens():
    assert RAMP.stages == (Stage(0, 0, 256), Stage(8, 2048, 512), Stage(14, 5120, 1024))
    sizes, tokens = [], 0
    for step in range(20):
        expected = 1024 if tokens >= 5000 else 512 if tokens >= 2000 else 256
        assert RAMP.tokens(step) == tokens and RAMP.stage(step).tokens_per_step == expected
        sizes.append(expected)
        tokens += expected
    assert sizes.count(256) == 8 and sizes.count(512) == 6


def test_tokens_and_steps_are_each_other_s_inverse():
    assert [RAMP.steps_in(RAMP.tokens(step)) for step in range(40)] == list(range(40))
    assert [RAMP.steps_in(RAMP.tokens(step) - 1) for step in range(1, 40)] == list(range(39))


def test_a_constant_batch_is_a_ramp_of_one_stage():
    constant = Ramp.of(BatchConfig(32, 512))
    assert constant.stages == (Stage(0, 0, 512),)
    assert constant.tokens(7) == 7 * 512 and constant.steps_in(7 * 512 + 511) == 7 and constant.index(10**9) == 0


def test_the_stages_that_a_run_reaches():
    assert [len(RAMP.reached(steps)) for steps in (1, 8, 9, 14, 15)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64", "'64' is not TOKENS:TOKENS_PER_STEP"),
        ("0:64,1.5:128", "'1.5:128' is not"),
        ("0:64,nan:128", "'nan:128' is not"),
        ("0:64,,", "'' is not"),
        ("0:0", "'0:0' is not"),
        ("0:2147483648", "is not"),
        ("1e3:64", "begins at 1000 tokens; it must begin at 0: 0:64"),
        ("0:128,1e3:128", "stages must grow, but 1000:128 follows 128"),
        ("0:64,10:128,20:256", "20:256 leaves no step to the stage before; the stage before begins at 64 tokens"),
        ("0:64,10:100", "100 tokens a step must be a multiple of batch.sequence_length=32; nearest: 96 or 128"),
    ],
)
def test_an_invalid_ramp_is_refused_with_a_valid_one(text, says):
    with pytest.raises(UserError) as error:
        Ramp.of(BatchConfig(32, 512, ramp=text))
    assert says in str(error.value) and str(error.value).startswith(f"--batch.ramp={text} cannot work: ")


def test_one_ramp_has_one_spelling():
    spelled = lambda ramp: with_ramp_spelled_out(Config(name="x", batch=BatchConfig(32, 512, ramp=ramp))).batch.ramp
    assert spelled("0:64, 2e8:128") == spelled("0:64,200000000:1.28e2") == "0:64,200000000:128"
    assert spelled("") == ""
