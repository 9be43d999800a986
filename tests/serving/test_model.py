"""Test what the page says of a model before the first message."""

from options.schema import with_options
from serving.model import OF_OTHERS, OF_STDLIB, TO_CONTINUE, model_of
from tests.helpers import tiny_config


def test_a_model_says_what_it_was_trained_on_without_the_folders_of_this_machine():
    config = with_options(tiny_config(), {"data.source": "chat-stdlib"})
    assert model_of(config, "chat", "f", True) == (
        "chat",
        "0.0 M parameters, trained on conversations about Python's standard library",
        OF_STDLIB,
        True,
    )
    mixture = with_options(config, {"data.source": "0.5:/home/me/one,0.5:/home/me/two"})
    assert model_of(mixture, "x", "f", True) == ("x", "0.0 M parameters, trained on one, two", OF_OTHERS, True)
    assert model_of(mixture, "x", "", True).about == "0.0 M parameters"  # converted: its text is not known
    base = model_of(mixture, "x", "f", False)
    assert base.about.endswith("trained on one, two. It continues texts: each message is one.")
    assert base.examples == TO_CONTINUE and not base.converses
