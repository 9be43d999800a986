"""Test what an export's model card says. test_chat_export.py and test_transformers.py run its code."""

import re
from dataclasses import replace

import pytest

from interchange.card import model_card
from options.schema import Config, DataConfig, EvalConfig
from tests.helpers import TINY
from tests.interchange.networks import ALL_EXPORTED


@pytest.mark.parametrize("features", [{}, ALL_EXPORTED], ids=["NanoChatForCausalLM", "the modeling file"])
def test_the_card_says_what_a_user_needs_and_tells_of_no_test(features):
    card = model_card(Config("one", model=replace(TINY, **features)), 8, 4096, None, "", True)
    assert not re.search("(?i)tried|tested", card)
    assert "torch and transformers" in card.splitlines()[-1] and ("vLLM" in card) == bool(features)


def test_the_card_has_a_prompt_of_the_run_and_no_path_of_its_machine():
    mixture, named = "0.7:~/web,0.3:gs://b/code,1:../good", "0.7:web,0.3:gs://b/code,1:good"
    for source, name in {"/home/me/web/": "web", ".": "a folder", "chat-stdlib": "chat-stdlib", mixture: named}.items():
        config = Config("one", model=TINY, data=DataConfig(source), eval=EvalConfig(prompts=("", source)))
        card = model_card(config, 8, 4096, None, "", True)
        assert f"| training text | {name} |" in card and f'"content": {source!r}}}' in card
