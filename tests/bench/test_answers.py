"""Test which answers bench.answers counts as right."""

import pytest

from bench.answers import is_right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("One.", "one", True),
        ("One.", "None.", False),
        ("json", "json.decoder", False),
        ("Return the length of a list.", "Return the number of items of a list.", True),
        ("Return a list.", "Serialize an object to a JSON formatted string.", False),
        ("", "No.", False),
    ],
)
def test_short_answers_are_right_word_for_word_and_long_ones_by_half(answer: str, truth: str, right: bool) -> None:
    assert is_right(answer, truth) == right
