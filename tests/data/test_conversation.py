"""Test that a conversation has nanochat's tokens and mask."""

import json
import os

import numpy as np
import pytest

from data.conversation import document_of, learned, messages_of, render, texts_of
from data.tokenizer import BOS, CHAT_TOKENS, train_tokenizer
from tests.data import nanochat_conversations

USER, END_USER, ANSWER, END, PYTHON, END_PYTHON, OUTPUT, END_OUTPUT = CHAT_TOKENS
TOKENIZER = train_tokenizer(["some words, and others"], 266)
SPECIAL = TOKENIZER.special_tokens


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


def spelled(messages: list, ask: bool = False) -> list[tuple[str, bool]]:
    """Return each special token and each character of the texts, with its mask."""
    tokens = render(TOKENIZER, messages_of(messages), ask)
    names = {i: name for name, i in SPECIAL.items()}
    return [
        (names.get(t) or TOKENIZER.decode([t]), bool(m)) for t, m in zip(tokens, learned(np.array(tokens), SPECIAL))
    ]


def test_an_answer_and_its_end_are_learned_and_nothing_else():
    expected = [(BOS, False), (USER, False), ("x", False), (END_USER, False), (ANSWER, False), ("y", True), (END, True)]
    assert spelled([message("user", "x"), message("assistant", "y")]) == expected
    assert spelled([message("user", "x")]) == expected[:4]
    assert spelled([message("user", "x")], ask=True) == expected[:5]


def test_a_call_is_learned_and_its_output_is_not():
    parts = [("text", "a"), ("python", "1"), ("python_output", "2"), ("text", "b")]
    answer = message("assistant", [{"type": kind, "text": text} for kind, text in parts])
    got = spelled([message("system", "s"), message("user", "x"), answer, message("user", "z")])
    assert "".join(text for text, _ in got[1:7]) == USER + "s\n\nx" + END_USER
    called = [(PYTHON, True), ("1", True), (END_PYTHON, True), (OUTPUT, False), ("2", False), (END_OUTPUT, False)]
    expected = [(ANSWER, False), ("a", True), *called, ("b", True), (END, True)]
    assert got[7:] == [*expected, (USER, False), ("z", False), (END_USER, False)]


def test_special_tokens_inside_a_text_stay_letters():
    tokens = render(TOKENIZER, [message("user", END_USER + ANSWER)])
    assert [t for t in tokens if t in SPECIAL.values()] == [SPECIAL[BOS], SPECIAL[USER], SPECIAL[END_USER]]
    assert TOKENIZER.decode(tokens) == END_USER + ANSWER


U, A = message("user", "x"), message("assistant", "y")


@pytest.mark.parametrize(
    "messages, problem",
    [
        ([], "no message of a user"),
        ([message("system", "s")], "no message of a user"),
        ("text", "no list of messages"),
        ([U, message("tool", "y")], "message 2 has the role 'tool'"),
        ([U, U], "has, after the user's, another message of user"),
        ([U, A, A], "has, after the assistant's, another message of assistant"),
        ([A], "begins with the message of assistant"),
        ([U, A, message("system", "s")], "message of system"),
        ([U, message("assistant", " ")], r"message 2 \(assistant\) is empty"),
        ([U, message("assistant", None)], r"message 2 \(assistant\) has no text"),
        ([message("user", [{"type": "text", "text": "x"}])], r"message 1 \(user\) has no text"),
        ([U, message("assistant", [{"type": "image", "text": "x"}])], "has a part other than"),
        ([U, message("assistant", [])], r"message 2 \(assistant\) is empty"),
    ],
)
def test_an_invalid_conversation_is_refused_with_the_reason(messages, problem: str):
    with pytest.raises(ValueError, match=problem):
        messages_of({"messages": messages})
    with pytest.raises(ValueError, match=problem):
        messages_of(messages)


def test_a_tokenizer_without_the_tokens_gets_them_after_its_own():
    content = json.loads(TOKENIZER.json)
    content["added_tokens"] = content["added_tokens"][:1]
    for name in CHAT_TOKENS:
        del content["model"]["vocab"][name]
    shift = lambda i: i and i - len(CHAT_TOKENS)
    content["model"]["vocab"] = {token: shift(i) for token, i in content["model"]["vocab"].items()}
    bare = type(TOKENIZER)(json.dumps(content))
    grown = bare.with_chat_tokens
    assert [grown.special_tokens[name] for name in CHAT_TOKENS] == [*range(bare.vocab_size, bare.vocab_size + 8)]
    assert grown.vocab_size == bare.vocab_size + 8 and not grown.token_bytes[bare.vocab_size :].any()
    assert grown.encode(["some words" + END]) == bare.encode(["some words" + END])
    assert grown.with_chat_tokens is grown


def require_equal(conversation: dict, ids: list[int], mask: list[int]) -> None:
    tokenizer = nanochat_conversations.our_tokenizer()
    tokens = render(tokenizer, messages_of(conversation))
    assert tokens == ids and learned(np.array(tokens), tokenizer.special_tokens).tolist() == [*map(bool, mask)]


def test_tokens_and_mask_are_those_that_nanochat_gave():
    kept = json.loads(nanochat_conversations.RESULTS.read_text())
    assert [conversation for conversation, _, _ in kept] == list(nanochat_conversations.conversations(0, 12))
    for conversation, ids, mask in kept:
        require_equal(conversation, ids, mask)


@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no checkout of nanochat")
def test_tokens_and_mask_of_random_conversations_are_nanochats():
    pytest.importorskip("torch")
    some = list(nanochat_conversations.conversations(1, 300))
    for conversation, (ids, mask) in zip(some, nanochat_conversations.their_renderings(some)):
        require_equal(conversation, ids, mask)


def test_a_document_is_one_spelling_of_a_conversation_with_an_answer():
    messages = [message("system", "s"), U, message("assistant", [{"type": "python", "text": "é\n"}])]
    others = [{**one, "name": None} for one in messages]
    assert document_of(messages) == document_of({"messages": others, "id": 7})
    assert texts_of(document_of(messages)) == ["s\n\nx", "é\n"]
    with pytest.raises(ValueError, match="no message of an assistant"):
        document_of([U])
