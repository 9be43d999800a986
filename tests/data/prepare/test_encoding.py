"""Test that tiktoken is used only if it gives the tokens of `tokenizers`."""

import json
import random
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from data.prepare.encoding import Encoder, tiktoken_of
from data.prepare.selection import train_tokenizer
from data.tokenizer import TextTokenizer

WORDS = ["alpha", "naïve", "日本語", "12345", "it's", "IT'S", "\n", "  ", "foo_bar();", "\t", "the", "😀", "\r\n\r\n"]


@cache
def trained() -> TextTokenizer:
    generator = random.Random(0)
    return train_tokenizer([" ".join(generator.choices(WORDS, k=2000))], 330)


def slow(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Return the tokens from `tokenizers`."""
    return tokenizer.encode([text])[0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=5))).map("".join))
def test_tiktoken_gives_the_tokens_of_tokenizers(text):
    encoder = Encoder(trained())
    assert encoder.fast and encoder.encode(text).tolist() == slow(trained(), text)


def changed(**model: object) -> TextTokenizer:
    """Return the tokenizer with parts of its file replaced."""
    facts = json.loads(trained().json)
    facts["normalizer"] = model.pop("normalizer", None)
    facts["model"] |= model
    return TextTokenizer(json.dumps(facts))


def test_tiktoken_is_not_used_if_its_order_of_merges_differs():
    merges = json.loads(trained().json)["model"]["merges"]
    swapped = [merges[1], merges[0], *merges[2:]]
    assert tiktoken_of(changed()) and not tiktoken_of(changed(merges=swapped))
    assert not tiktoken_of(changed(dropout=0.1)) and not tiktoken_of(changed(normalizer={"type": "NFC"}))


def test_blanks_that_tiktoken_cannot_take_are_encoded():
    text = "a" + " " * 200_000 + "b"
    assert Encoder(trained()).encode(text).tolist() == slow(trained(), text)
