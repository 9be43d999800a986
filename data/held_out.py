"""The choice of held-out documents: by a hash of their text, or by a word in their file's name."""

import hashlib
import re

HELD_OUT = {"validation", "valid", "val", "dev", "eval"}  # words in the names of publishers' held-out files


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the held-out fraction. So equal
    texts share a side in every dataset."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def name_words(name: str) -> set[str]:
    """Return the words of a file's name, which may name a split."""
    return set(re.split("[^a-z]+", name.lower()))
