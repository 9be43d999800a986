"""Test that conversations about modules agree with the modules' documentation."""

import re

import pytest

from data.conversation import messages_of
from data.prepare.chat_stdlib import conversations_of

MODULE = '''"""Summary of
the module.

More."""
class Queue(Base):
    """A queue."""
    def __init__(self, size: int = 0): ...
    def put(self, item, /, *rest, block=True, **options) -> "None":
        """Put an item."""
    @staticmethod
    def of(item): "Return \\ud800."
    def _hidden(self): "Hidden."
async def wait(seconds=1.5): "Wait."
def undocumented(): ...
'''


EXPECTED = {
    ("m", "What does m do?"): "Summary of the module.",
    ("m", "Explain more."): "Summary of\nthe module.\n\nMore.",
    ("m", "Which classes does it have?"): "Queue",
    ("m", "Name its functions."): "wait, undocumented",
    ("m.Queue", "Name its methods."): "put, of",
    ("m.Queue", "What is its base class?"): "Base",
    ("m.Queue", "Show its constructor."): "Queue(size: int=0)",
    ("m.Queue", "And put?"): "Put an item.",
    ("m.Queue.put", "Show its signature."): "put(item, /, *rest, block=True, **options) -> 'None'",
    ("m.Queue.put", "Name its parameters."): "item, *rest, block, **options",
    ("m.Queue.put", "How many parameters?"): "Four.",
    ("m.Queue.put", "What is the default of block?"): "True",
    ("m.Queue.put", "Which module?"): "m",
    ("m.Queue.of", "Describe m.Queue.of."): "Return ?.",
    ("m.Queue.of", "Show its signature."): "of(item)",
    ("m.wait", "Must I await it?"): "Yes.",
    ("m.wait", "And the default of seconds?"): "1.5",
    ("m.wait", "Is it a function or a method?"): "A function.",
}


def test_answers_follow_from_the_module() -> None:
    """Look at all answers about MODULE by subject and question. A hash of the name picks questions; 40 names ask
    all. Only what is public and has a docstring is asked for."""
    answers: dict[tuple[str, str], set[str]] = {}
    for number in range(40):
        for messages in conversations_of(MODULE, f"m{number}"):
            assert messages_of(messages) == messages
            texts = [message["content"].replace(f"m{number}", "m") for message in messages]
            subject = next(match[0] for text in texts[::2] if (match := re.search(r"\bm(\.\w+)*\b", text)))
            for question, answer in zip(texts[::2], texts[1::2]):
                answers.setdefault((subject, question), set()).add(answer)
    assert {asked: answers[asked] for asked in EXPECTED} == {asked: {answer} for asked, answer in EXPECTED.items()}
    assert {subject for subject, _ in answers} == {"m", "m.Queue", "m.Queue.put", "m.Queue.of", "m.wait"}


@pytest.mark.parametrize("code", ["def f(:", "\0", "(" * 1000], ids=["syntax", "nul", "nested"])
def test_code_that_does_not_parse_has_no_conversation(code: str) -> None:
    assert list(conversations_of(code, "m")) == []
