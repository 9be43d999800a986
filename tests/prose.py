"""Check the words of every text: python -m tests.prose. Print each place and a plainer word; exit code 1 if any."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.reference import repository_files

UNCHECKED = re.compile(r"CHANGELOG\.md|.*LICENSE|tests/.*(prose\.py|words\.txt)|.*\.(png|svg|jsonl?|gz)$")
MOST_WORDS = 40  # in a sentence of docs/ or README.md
PLAINER = {
    "anew": "again",
    "as it is": "unchanged",
    "beside": "next to, in addition to",
    "go(es)? on": "continue",
    r"held(?!\W+out)": "contained, stored, kept, compared",
    "is none of": "is not one of",
    "lies": "is, is stored",
    "so many": "this many, or the number's name",
    "stands": "is, means",
    "that of": "the noun again",
    "told": "notified, shown, distinguished",
    "where there (is|are)": "if there is",
}
AVOIDED = [(re.compile(rf"\b({old})\b".replace(" ", r"[\s#/]+"), re.I), new) for old, new in PLAINER.items()]
NO_VERB = re.compile(r'^ *"""(Of|Whether|What|Who)\b', re.M)
CODE = re.compile(r"^ *```.*?^ *```|^ *\|.*?$|^#.*?$", re.M | re.S)  # of Markdown; tables and headings, too
SENTENCE = re.compile(r"[^\s.!?:*-](?:(?!\n\n|\n *[-*] |\n *\d+\. |[.!?:]\s).)*", re.S)


def problems(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each thing that is not plain in a file's text."""
    line = lambda match: text.count("\n", 0, match.start()) + 1
    for old, new in AVOIDED:
        yield from ((line(match), f"{match[0]!r}: write {new}") for match in old.finditer(text))
    if path.endswith(".py") and not path.startswith("tests/"):
        yield from ((line(match), "begin the docstring with a verb or a noun") for match in NO_VERB.finditer(text))
    if re.match(r"(docs/|README).*\.md$", path):
        for match in SENTENCE.finditer(CODE.sub(lambda code: re.sub(r"\S", " ", code[0]), text)):
            words = re.sub(r"`[^`]*`|\]\([^)]*\)", "_", match[0]).split()
            if len(words) > MOST_WORDS:
                yield line(match), f"divide the sentence of {len(words)} words: {' '.join(words[:6])} ..."


if __name__ == "__main__":
    paths = [path for path in map(str, repository_files()) if not UNCHECKED.match(path)]
    found = [
        f"{path}:{line}: {what}" for path in paths for line, what in sorted(problems(path, Path(path).read_text()))
    ]
    sys.exit("\n".join(found) or 0)
