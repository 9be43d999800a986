"""Test that every task of reinforcement has what a run of it needs, and that a task without it is refused."""

from dataclasses import replace
from typing import get_args

import pytest

from configs.reinforce import TOKENS, tokens_of
from options.schema import ReinforceConfig, hints
from reinforcement.tasks import TASKS
from system.errors import UserError


def test_every_task_has_a_class_a_name_and_its_tokens():
    names = get_args(hints()["reinforce.task"])
    assert set(names) == TASKS.keys() == TOKENS.keys()
    assert tokens_of(ReinforceConfig(task="sums", difficulty=2)) == 42
    assert tokens_of(ReinforceConfig(task="gsm8k", difficulty=2)) == 768


def test_a_task_that_is_missing_in_the_table_is_refused_with_the_table():
    with pytest.raises(UserError, match=r"--reinforce.task=haiku: TOKENS in configs/reinforce.py .* has sums, gsm8k"):
        tokens_of(replace(ReinforceConfig(), task="haiku"))
