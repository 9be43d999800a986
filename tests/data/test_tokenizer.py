import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.tokenizer import BOS, encode_documents, load_tokenizer, token_bytes, train_tokenizer

TEXTS = ["def tokens(text):\n    return text.split()\n\n" * 20, "Größe 2024, naïve 日本語, 12345 🙂\r\n\t" * 20]
TOKENIZER = train_tokenizer(TEXTS, 320)
TRICKY = f"a{BOS}b {BOS}"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts)
@example(TRICKY)
@example("\x00\r\n\u2028  \t ")
@example("don't 1234567 ÀÉ é\u0301")
def test_any_text_decodes_to_itself(text):
    ids = encode_documents(TOKENIZER, [text])
    assert TOKENIZER.decode(ids[1:].tolist()) == text


@given(st.lists(texts, max_size=5))
@example([TRICKY, ""])
def test_one_bos_stands_before_each_document_and_nowhere_else(documents):
    ids = encode_documents(TOKENIZER, documents)
    starts = np.flatnonzero(ids == TOKENIZER.token_to_id(BOS))
    assert len(starts) == len(documents)
    parts = np.split(ids, starts)
    assert len(parts[0]) == 0
    assert [TOKENIZER.decode(part[1:].tolist()) for part in parts[1:]] == documents


@given(texts)
@example(TRICKY)
def test_token_bytes_sum_to_the_texts_utf8_length(text):
    ids = encode_documents(TOKENIZER, [text, text])
    assert token_bytes(TOKENIZER)[ids].sum() == 2 * len(text.encode())


def test_vocabulary_is_the_bos_the_bytes_and_merges():
    sizes = token_bytes(TOKENIZER)
    assert TOKENIZER.get_vocab_size() == len(sizes) == 320
    assert TOKENIZER.token_to_id(BOS) == 0
    assert (sizes == 0).tolist() == [True] + [False] * 319
    assert (sizes == 1).sum() == 256


def test_training_twice_gives_the_same_tokenizer():
    assert train_tokenizer(TEXTS, 320).to_str() == TOKENIZER.to_str()


@pytest.mark.parametrize("source", ["trained", "loaded"])
def test_prompts_too_may_hold_the_letters_of_the_bos(source, tmp_path):
    """sample.py encodes prompts with the tokenizer's own `encode`."""
    tokenizer = train_tokenizer(TEXTS, 320)
    if source == "loaded":
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode(TRICKY).ids) == TRICKY


def test_loaded_tokenizer_is_the_saved_one(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(encode_documents(loaded, TEXTS), encode_documents(TOKENIZER, TEXTS))
