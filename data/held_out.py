"""Which documents are held out: by a hash of their text, or by a word in the name of the file that they are in."""

import hashlib
import re

HELD_OUT = {"validation", "valid", "val", "dev", "eval"}  # words in names of files that publishers hold out


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the fraction to hold out: so equal
    texts share a side in every dataset, whatever else is in it."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def name_words(name: str) -> set[str]:
    """Return the words of a file's name, which say its split."""
    return set(re.split("[^a-z]+", name.lower()))
