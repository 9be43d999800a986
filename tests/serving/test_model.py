"""Test what the page says of a model before the first message."""

from options.schema import with_options
from serving.model import OF_OTHERS, OF_STDLIB, model_of
from tests.helpers import tiny_config


def test_a_model_says_what_it_was_trained_on_without_the_folders_of_this_machine():
    config = with_options(tiny_config(), {"data.source": "chat-stdlib"})
    assert model_of(config, "chat", "f") == (
        "chat",
        "0.0 M parameters, trained on conversations about Python's standard library",
        OF_STDLIB,
    )
    mixture = with_options(config, {"data.source": "0.5:/home/me/one,0.5:/home/me/two"})
    assert model_of(mixture, "x", "f") == ("x", "0.0 M parameters, trained on one, two", OF_OTHERS)
    assert model_of(mixture, "x", "").about == "0.0 M parameters"  # converted: its text is not known
