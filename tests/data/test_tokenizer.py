import json

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from configs.schema import UserError
from data.tokenizer import BOS, CHAT_TOKENS, SPLIT, TextTokenizer, convert_tiktoken, load_tokenizer, train_tokenizer

TEXTS = ["def tokens(text):\n    return text.split()\n\n" * 20, "Größe 2024, naïve 日本語, 12345 🙂\r\n\t" * 20]
TOKENIZER = train_tokenizer(TEXTS, 328)
SPECIAL = [BOS, *CHAT_TOKENS]
TRICKY = f"a{BOS}b {BOS}"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(st.lists(texts, max_size=4))
@example([TRICKY, ""])
@example(["\x00\r\n\u2028  \t "])
@example(["don't 1234567 ÀÉ é\u0301"])
def test_any_text_decodes_to_itself_without_a_bos_in_it(documents):
    for ids, text in zip(TOKENIZER.encode(documents), documents, strict=True):
        assert TOKENIZER.decode(ids) == text
        assert TOKENIZER.bos not in ids
        assert TOKENIZER.token_bytes[ids].sum() == len(text.encode())


def test_vocabulary_is_nanochat_s_special_tokens_the_bytes_and_merges():
    sizes = TOKENIZER.token_bytes
    assert TOKENIZER.vocab_size == len(sizes) == 328
    assert TOKENIZER.special_tokens == {token: i for i, token in enumerate(SPECIAL)}
    assert TOKENIZER.bos == 0
    assert (sizes == 0).tolist() == [True] * 9 + [False] * 319
    assert (sizes == 1).sum() == 256


def test_saved_tokenizer_is_the_same_to_the_byte_and_other_programs_find_its_bos(tmp_path):
    TOKENIZER.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(name)
        assert loaded.sha256 == TOKENIZER.sha256
        assert loaded.encode([TRICKY, *TEXTS]) == TOKENIZER.encode([TRICKY, *TEXTS])
    facts = json.loads((tmp_path / "tokens.json").read_text())
    assert facts == {"bos": 0, "token_bytes": TOKENIZER.token_bytes.tolist()}
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.json", "tokenizer.json"}


def test_a_folder_with_another_tokenizer_is_refused(tmp_path):
    TOKENIZER.require_same_in(tmp_path)
    TOKENIZER.save(tmp_path)
    TOKENIZER.require_same_in(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} has another tokenizer.*--tokenizer={tmp_path}"):
        train_tokenizer(TEXTS, 300).require_same_in(tmp_path)


# An invented tiktoken encoding: the ranks from training on TEXTS, with GPT-2's kind of BOS at the end.
def ranks_of(tokenizer: TextTokenizer) -> dict[bytes, int]:
    letters = {letter: tokenizer.library.decode([i]) for letter, i in tokenizer.library.get_vocab().items()}
    for token in SPECIAL:
        del letters[token]
    byte = {letter: bytes([b]) for b, letter in enumerate(byte_letters())}
    tokens = {letters_: b"".join(byte[letter] for letter in letters_) for letters_ in letters}
    return {token: tokenizer.library.token_to_id(name) - len(SPECIAL) for name, token in tokens.items()}


def byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: printable bytes are themselves."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, extra = [], 0
    for b in range(256):
        letters.append(chr(b) if b in prints else chr(256 + extra))
        extra += b not in prints
    return letters


RANKS = ranks_of(TOKENIZER)
ENCODING = tiktoken.Encoding("made_up", pat_str=SPLIT, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": 319})
CONVERTED = convert_tiktoken(RANKS, SPLIT, {"<|endoftext|>": 319})


@given(st.lists(st.one_of(texts, st.text("def tokens(x): \nreturn12, naïve", max_size=40)), min_size=1, max_size=4))
def test_a_converted_tiktoken_encoding_encodes_as_tiktoken_does(documents):
    assert CONVERTED.encode(documents) == [ENCODING.encode_ordinary(text) for text in documents]


def test_a_converted_tiktoken_encoding_knows_its_bos_and_bytes():
    assert CONVERTED.bos == 319 and CONVERTED.vocab_size == 320
    assert CONVERTED.token_bytes.tolist() == [*(len(t) for t in sorted(RANKS, key=RANKS.get)), 0]


def test_gpt2_comes_from_tiktoken_by_name(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": ENCODING}.__getitem__)
    assert load_tokenizer("tiktoken:gpt2").sha256 == CONVERTED.sha256
    with pytest.raises(UserError, match=r"tiktoken:gpt9.*cl100k_base"):
        load_tokenizer("tiktoken:gpt9")


def test_sentencepiece_tokens_have_the_bytes_of_their_text():
    vocab = {"<s>": 0, "<0x0A>": 1, "▁hé": 2, "llo": 3}
    library = Tokenizer(models.BPE(vocab, []))
    library.add_special_tokens(["<s>"])
    tokenizer = TextTokenizer(library.to_str())
    assert tokenizer.token_bytes.tolist() == [0, 1, 4, 3]
    assert tokenizer.bos == 0


def test_settings_of_a_foreign_tokenizer_json_do_not_shorten_or_pad():
    library = Tokenizer.from_str(TOKENIZER.json)
    library.enable_truncation(3)
    library.enable_padding(length=9)
    assert TextTokenizer(library.to_str()).encode(TEXTS) == TOKENIZER.encode(TEXTS)


def test_a_tokenizer_without_a_bos_is_refused_and_its_special_tokens_named():
    library = Tokenizer(models.BPE({"[CLS]": 0, "a": 1}, []))
    library.add_special_tokens(["[CLS]"])
    with pytest.raises(UserError, match=r"<\|endoftext\|>.*\[CLS\]"):
        _ = TextTokenizer(library.to_str()).bos


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=str(path)):
        load_tokenizer(path)


def directly_trained(texts: list[str], size: int) -> str:
    """Train with the library alone, on complete pieces."""
    library = Tokenizer.from_str(TOKENIZER.json)
    library.model = models.BPE()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    fresh = Tokenizer(models.BPE())
    fresh.pre_tokenizer, fresh.decoder = library.pre_tokenizer, library.decoder
    fresh.train_from_iterator(texts, trainer)
    return fresh.to_str()


LINE = "ordinary text, with numbers 1234 and_names, Größe 日本語。 " * 3 + "\n"
LONG = [LINE * 50, " " * 4000 + "x" * 4000 + "=" * 4000, "\n".join(word * 9 for word in LINE.split())]


def test_training_on_pieces_of_ordinary_length_is_the_librarys_to_the_byte():
    assert train_tokenizer(LONG, 330).json == directly_trained(LONG, 330)


def test_an_unbroken_run_is_learned_from_in_parts():
    """Uncut, the run would give tokens of up to 65,536 letters, in a time that grows with the square of its length."""
    assert train_tokenizer(["a" * 70_000], 290).token_bytes.max() == 4096
    runs = train_tokenizer(["ab" * 10_000 + " " * 10_000 + "=" * 10_000 + "é" * 10_000], 330)
    assert runs.token_bytes.max() <= 2 * 4096  # é has two bytes
