import json
import random
import sys
from itertools import product

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.prepare.encoding import BLANKS, MARK, MARKED_SPLIT, Encoder, marked, tiktoken_of
from data.prepare.selection import text_lost, train_tokenizer
from data.tokenizer import BOS, CHAT_TOKENS, TextTokenizer, load_tokenizer
from data.tokenizer_formats import SPLIT, bos_template, byte_letters, convert_tiktoken, find_tokenizer
from system.errors import UserError

TEXTS = ["def tokens(text):\n    return text.split()\n\n" * 20, "Größe 2024, naïve 日本語, 12345 🙂\r\n\t" * 20]
TOKENIZER = train_tokenizer(TEXTS, 328)
SPECIAL = [BOS, *CHAT_TOKENS]
TRICKY = f"a{BOS}b {BOS}"
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=50)
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
    TOKENIZER.require_same_in(tmp_path)
    TOKENIZER.save(tmp_path)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(name)
        assert loaded.json == TOKENIZER.json
        assert loaded.encode([TRICKY, *TEXTS]) == TOKENIZER.encode([TRICKY, *TEXTS])
    facts = json.loads((tmp_path / "tokens.json").read_text())
    assert facts == {"bos": 0, "token_bytes": TOKENIZER.token_bytes.tolist(), "added_bytes": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.json", "tokenizer.json"}
    TOKENIZER.require_same_in(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} has another tokenizer.*--tokenizer={tmp_path}"):
        train_tokenizer(TEXTS, 300).require_same_in(tmp_path)


@pytest.mark.parametrize("own", [None, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}])
def test_another_spelling_of_an_export_s_tokenizer_is_the_same_and_other_merges_are_not(own, tmp_path):
    facts, template = json.loads(TOKENIZER.json), json.loads(bos_template(TOKENIZER))
    processor = {"type": "Sequence", "processors": [own, template]} if own else template
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": BOS}
    (tmp_path / "tokenizer.json").write_text(json.dumps(facts | {"post_processor": processor, "padding": padding}))
    found = find_tokenizer(tmp_path)
    assert found.is_same_as(TOKENIZER) and found.sha256 != TOKENIZER.sha256
    assert bool(found.library.post_processor) == bool(own)
    found.save(tmp_path / "run")
    TOKENIZER.require_same_in(tmp_path / "run")
    first, second, *others = facts["model"]["merges"]
    other = facts | {"model": facts["model"] | {"merges": [second, first, *others]}}
    assert not TextTokenizer(json.dumps(other)).is_same_as(TOKENIZER)


# An invented tiktoken encoding: the ranks from training on TEXTS, with GPT-2's kind of BOS at the end.
LETTERS, VOCAB = byte_letters(), TOKENIZER.library.get_vocab()
RANKS = {bytes(map(LETTERS.get, name)): i - len(SPECIAL) for name, i in VOCAB.items() if name not in SPECIAL}
ENCODING = tiktoken.Encoding("made_up", pat_str=SPLIT, mergeable_ranks=RANKS, special_tokens={"<|endoftext|>": 319})
CONVERTED = convert_tiktoken(RANKS, SPLIT, {"<|endoftext|>": 319})
WORDS = ["alpha", "naïve", "日本語", "12345", "it's", "IT'S", "\n", "  ", "foo_bar();", "\t", "the", "😀", "\r\n\r\n"]
OTHER = train_tokenizer([" ".join(random.Random(0).choices(WORDS, k=2000))], 330)
OF_CHARACTERS = convert_tiktoken(RANKS, r"[\s\S]", {"<|endoftext|>": 319})
ENCODERS = {tokenizer: Encoder(tokenizer) for tokenizer in (TOKENIZER, OTHER, CONVERTED, OF_CHARACTERS)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(texts, st.sampled_from(WORDS), st.text("def tokens(x): \nreturn12, naïve")), max_size=4))
def test_a_preparation_tiktoken_and_tokenizers_give_the_same_tokens(documents):
    documents = [*documents, "".join(documents)]
    assert CONVERTED.encode(documents) == [ENCODING.encode_ordinary(text) for text in documents]
    for tokenizer, encoder in ENCODERS.items():
        assert encoder.fast and [encoder.encode(text).tolist() for text in documents] == tokenizer.encode(documents)


def test_marked_text_is_cut_as_text_is_by_the_expression_that_looks_ahead():
    """All texts of up to five letters, of each kind that the expression knows. Each is a token, so a word is one."""
    every = ["".join(letters) for count in range(1, 6) for letters in product("a'5. \n\u3000", repeat=count)]
    words = [*(bytes([i]) for i in range(256)), *(text.encode() for text in every if len(text.encode()) > 1)]
    ranks = {word: i for i, word in enumerate(words)}
    mark = len(ranks)
    plain = tiktoken.Encoding("plain", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    fast = tiktoken.Encoding("fast", pat_str=MARKED_SPLIT, mergeable_ranks=ranks, special_tokens={MARK: mark})
    for text in every:
        ids = fast.encode(marked(text), allowed_special={MARK}, disallowed_special=())
        assert [i for i in ids if i != mark] == plain.encode_ordinary(text), repr(text)


def test_blanks_are_those_of_tiktoken():
    bytes_only = {bytes([i]): i for i in range(256)}
    blank = tiktoken.Encoding("blanks", pat_str=r"\s", mergeable_ranks=bytes_only, special_tokens={})
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, sys.maxunicode + 1))))
    assert bytes(blank.encode_ordinary(every)).decode() == BLANKS


def test_tiktoken_is_not_used_if_a_tokenizer_joins_in_another_order_or_does_more():
    facts = json.loads(OTHER.json)
    first, second, *others = facts["model"]["merges"]
    other = {"merges": [second, first, *others]}, {"merges": [first, second]}, {"dropout": 0.1}
    for change in ({"normalizer": {"type": "NFC"}}, *({"model": facts["model"] | one} for one in other)):
        assert not tiktoken_of(TextTokenizer(json.dumps(facts | change)))
    assert tiktoken_of(OTHER)


def test_tiktoken_is_not_used_if_the_merges_do_not_lead_to_a_token():
    """`tokenizers` spells abc as ab and c, since ab comes first; tiktoken would join these."""
    facts = json.loads(train_tokenizer(["a"], 265).json)
    vocab = facts["model"]["vocab"] | {"ab": 265, "bc": 266, "abc": 267}
    for merges, is_used in (
        ([["a", "b"], ["b", "c"], ["ab", "c"]], True),
        ([["a", "b"], ["b", "c"], ["a", "bc"]], False),
    ):
        tokenizer = TextTokenizer(json.dumps(facts | {"model": facts["model"] | {"vocab": vocab, "merges": merges}}))
        assert bool(tiktoken_of(tokenizer)) == is_used
        assert Encoder(tokenizer).encode("abc").tolist() == tokenizer.encode(["abc"])[0]


def test_text_that_the_expression_does_not_match_is_encoded_too():
    tokenizer = convert_tiktoken(RANKS, ".", {"<|endoftext|>": 319})
    encoder = Encoder(tokenizer)
    assert encoder.fast and encoder.encode("a\nb").tolist() == tokenizer.encode(["a\nb"])[0]


def test_three_digits_at_most_are_a_word_as_in_tiktoken():
    ranks = {bytes([i]): i for i in range(256)} | {f"{i:02}".encode(): 256 + i for i in range(100)}
    ranks |= {f"{i:03}".encode(): 356 + i for i in range(1000)}
    for pattern in (r"\p{N}{1,3}+|\p{L}+|\s+", r"\p{N}{1,3}|\p{L}+|\s+"):  # cl100k_base has the first
        encoding = tiktoken.Encoding("digits", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<bos>": 1356})
        converted = convert_tiktoken(ranks, pattern, {"<bos>": 1356})
        assert converted.encode(["12345678 99"]) == [encoding.encode("12345678 99")]


def test_a_tiktoken_encoding_comes_by_name_and_knows_its_bos_and_bytes(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": ENCODING}.__getitem__)
    assert find_tokenizer("tiktoken:gpt2").sha256 == CONVERTED.sha256
    with pytest.raises(UserError, match=r"tiktoken:gpt9.*cl100k_base"):
        find_tokenizer("tiktoken:gpt9")
    assert CONVERTED.bos == 319 and CONVERTED.vocab_size == 320
    assert CONVERTED.token_bytes.tolist() == [*(len(t) for t in sorted(RANKS, key=RANKS.get)), 0]


def foreign(vocab: dict[str, int], special: str) -> TextTokenizer:
    library = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    library.add_special_tokens([special])
    return TextTokenizer(library.to_str())


FOREIGN_TEXT = "naïve ġĠ 日本, the  cat"
BYTES = [f"<0x{i:02X}>" for i in range(256)]
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(prepend_scheme="always")
UNBLANK = decoders.Replace("▁", " ")
KINDS = {
    # Its vocabulary has all letters of a byte-level one.
    "byte_fallback": (normalizers.Replace(" ", "▁"), decoders.Sequence([UNBLANK, decoders.ByteFallback()])),
    "llama": (
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoders.Sequence([UNBLANK, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ),
    "metaspace": METASPACE,
    "metaspace_never": (
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        decoders.Metaspace(prepend_scheme="never"),
    ),
    "byte_level": (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
}


def of_kind(kind: str) -> TextTokenizer:
    """Return a tokenizer that spells FOREIGN_TEXT as `kind` does."""
    before, decoder = KINDS[kind]
    words = ["<s>", *pre_tokenizers.ByteLevel.alphabet(), *sorted({*FOREIGN_TEXT, "▁"})]
    words += BYTES if isinstance(decoder, decoders.Sequence) else []
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    library = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    setattr(library, "normalizer" if isinstance(before, normalizers.Normalizer) else "pre_tokenizer", before)
    library.decoder = decoder
    library.add_special_tokens(["<s>"])
    return TextTokenizer(library.to_str())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_text_are_counted_as_its_decoder_spells_them(kind):
    tokenizer = of_kind(kind)
    for text in (FOREIGN_TEXT, "\x07the cat" if kind in ("byte_fallback", "llama", "byte_level") else "the"):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.decode(ids).strip() == text
        assert tokenizer.text_bytes(np.array([tokenizer.bos, *ids[:-1]]), np.array(ids)).sum() == len(text.encode())
    assert tokenizer.added_bytes == (kind in ("llama", "metaspace", "byte_level"))


def test_each_text_of_a_conversation_has_a_first_token():
    tokenizer = of_kind("metaspace")
    (ids,) = tokenizer.encode(["the cat"])
    row = np.array([tokenizer.bos, *ids, tokenizer.bos, *ids])
    assert tokenizer.text_bytes(row[:-1], row[1:]).sum() == 2 * len("the cat")


@pytest.mark.parametrize("changes", [normalizers.Lowercase(), normalizers.NFKC(), normalizers.Replace(" ", "")])
def test_a_tokenizer_that_loses_text_is_noticed_with_the_document(changes):
    library = Tokenizer.from_str(TOKENIZER.json)
    library.normalizer = changes
    changed = TextTokenizer(library.to_str())
    texts = {"a.txt": "", "b.txt": " Naïve  ﬁve"}
    lost = text_lost(changed, texts, changed.encode([*texts.values()]))
    assert "b.txt decode from character" in lost


def test_foreign_tokenizers_have_their_bos_and_bytes_and_settings_without_effect():
    sentencepiece = foreign({"<s>": 0, "<0x0A>": 1, "▁hé": 2, "llo": 3}, "<s>")
    assert sentencepiece.token_bytes.tolist() == [0, 1, 4, 3] and sentencepiece.bos == 0
    library = Tokenizer.from_str(TOKENIZER.json)
    library.add_tokens(["日本é"])  # of a byte-level vocabulary, but not in its letters
    assert TextTokenizer(library.to_str()).token_bytes.tolist() == [*TOKENIZER.token_bytes, 8]
    with pytest.raises(UserError, match=r"<\|endoftext\|>.*\[CLS\]"):
        _ = foreign({"[CLS]": 0, "a": 1}, "[CLS]").bos
    library = Tokenizer.from_str(TOKENIZER.json)
    library.enable_truncation(3)
    library.enable_padding(length=9)
    assert TextTokenizer(library.to_str()).encode(TEXTS) == TOKENIZER.encode(TEXTS)


def test_an_unbroken_run_is_learned_from_in_parts():
    """Uncut, the run would give tokens of up to 65,536 letters, in a time that grows with the square of its length. A
    part of 4,096 letters takes three times as long as its parts of 256."""
    assert train_tokenizer(["a" * 70_000], 290).token_bytes.max() == 256
    runs = train_tokenizer(["ab" * 10_000 + " " * 10_000 + "=" * 10_000 + "é" * 10_000], 330)
    assert runs.token_bytes.max() <= 2 * 256  # é has two bytes
