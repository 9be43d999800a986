"""tests/prose.py finds what it is to find, in texts of its own."""

import pytest

from tests.prose import problems


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("model/x.py", "# The cache goes\n    # on here.", "write continue"),
        ("tests/x.py", "# It was told so.", "write notified"),
        ("model/x.py", 'x: int\n"""Whether it is so."""', "begin the docstring with a verb or a noun"),
        ("docs/x.md", "# A page\n\n- One.\n- " + "word " * 41 + "end.", "divide the sentence of 42 words: word"),
    ],
)
def test_each_kind_of_problem_is_found_at_its_line(path, text, problem):
    [(line, found)] = problems(path, text)
    assert problem in found
    assert line == {"docs/x.md": 4, "model/x.py": 1 + text.startswith("x")}.get(path, 1)


@pytest.mark.parametrize("path", ["README.md", "docs/x.md", "model/x.py"])
def test_plain_text_is_not_reported(path):
    text = 'Text is held\nout. `held_out` is a name.\n"""Return it."""\n\n'
    text += f"| {'cell | ' * 60}\n\n```\n{'x ' * 60}\n```\n"
    assert not list(problems(path, text))
