"""Test that a conversation has nanochat's tokens and mask, and fits in one row."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.conversation import document_of, messages_of, render, texts_of
from data.dataset import Text, open_text
from data.loader import StepBatches
from data.packing import learned
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from data.tokenizer import CHAT_TOKENS
from options.schema import DataConfig
from system.errors import UserError
from tests.data import nanochat_conversations
from tests.data.preparations import read_shard, tokens_of

USER, END_USER, ANSWER, END, *_ = CHAT_TOKENS
TOKENIZER = train_tokenizer(["some words, and others"], 266)
SPECIAL = TOKENIZER.special_tokens
LENGTH = 96  # of rows


def message(role: str, content) -> dict:
    return {"role": role, "content": content}


U, A = message("user", "x"), message("assistant", "y")


def test_tokens_and_mask_are_those_that_nanochat_gave():
    kept = json.loads(nanochat_conversations.RESULTS.read_text())
    assert [conversation for conversation, _, _ in kept] == list(nanochat_conversations.conversations(0, 12))
    for conversation, ids, mask in kept:
        tokenizer = nanochat_conversations.our_tokenizer()
        tokens = render(tokenizer, messages_of(conversation))
        assert tokens == ids and learned(np.array(tokens), tokenizer.special_tokens).tolist() == [*map(bool, mask)]
    asked, complete = render(TOKENIZER, messages_of([U]), ask=True), render(TOKENIZER, messages_of([U, A]))
    assert asked == complete[: len(asked)] and asked[-1] == TOKENIZER.special_tokens["<|assistant_start|>"]


def test_a_document_is_one_spelling_of_a_conversation_with_an_answer():
    messages = [message("system", "s"), U, message("assistant", [{"type": "python", "text": "é\n"}])]
    others = [{**one, "name": None} for one in messages]
    assert document_of(messages) == document_of({"messages": others, "id": 7})
    assert texts_of(document_of(messages)) == ["s\n\nx", "é\n"]
    with pytest.raises(ValueError, match="no message of an assistant"):
        document_of([U])


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    some = [one for one in nanochat_conversations.conversations(3, 120) if len(messages_of(one)) > 1]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, some)))
    given = {"vocab_size": 290, "val_fraction": 0.2, "conversations": True}
    prepare(Preparation(source=f"{folder}/a.jsonl", **given), folder / "made")
    return folder / "made"


def opened(source: object, cache: Path, length: int = LENGTH, **options) -> Text:
    return open_text(DataConfig(str(source), packing="whole", **options), 290, length, 1, cache)


def documents(chat: Path) -> list[tuple[int, ...]]:
    tokens, starts = read_shard(chat / "train_000000.bin"), np.load(chat / "train_000000.starts.npy")
    return [tuple(one.tolist()) for one in np.split(tokens, starts[1:])]


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_conversations_share_rows_and_count_what_an_assistant_writes(chat, tmp_path, too_long):
    text, every, counts = opened(chat, tmp_path, too_long=too_long), documents(chat), Counter()
    longer = [document for document in every if len(document) > LENGTH + 1]  # the last token is only a target
    for row in (text.train[0][i] for i in range(len(text.train[0]))):
        starts = np.flatnonzero(row["inputs"] == text.tokenizer.bos)
        for start, stop in zip(starts, [*starts[1:], LENGTH]):
            piece, weights = tuple(row["inputs"][start:stop].tolist()), row["weights"][start:stop]
            if len(piece) == 1:  # padding
                assert not weights.any()
                continue
            (document,) = {one for one in every if one == piece} or {one for one in every if one[:LENGTH] == piece}
            expected = learned(np.array([*document, text.tokenizer.bos]), text.tokenizer.special_tokens)
            assert weights.tolist() == expected[1 : len(piece) + 1].tolist()
            counts[document] += 1
    assert 5 < len(longer) < len(every) - 5
    assert counts == Counter(every) - (Counter(longer) if too_long == "drop" else Counter())
    what = "cut at their row's end" if too_long == "cut" else "left out"
    assert f"more than 97 tokens are {what}" in text.too_long
    assert f"made {len(longer)} of {len(every)} to train on and " in text.too_long
    assert len(list(chat.glob(f"plans/*-whole-{too_long}-*{LENGTH}-*"))) == 2


def test_a_conversation_of_one_token_more_than_a_row_is_whole(chat, tmp_path):
    """Its last token is only a target, so no target is lost."""
    special = opened(chat, tmp_path).tokenizer.special_tokens
    length = max(map(len, documents(chat))) - 1
    for too_long in ("cut", "drop"):
        text = opened(chat, tmp_path, length, too_long=too_long)
        rows = [text.train[0][i] for i in range(len(text.train[0]))]
        assert sum(row["weights"].sum() for row in rows) == sum(
            learned(np.array(one), special).sum() for one in documents(chat)
        )
        assert "made 0 of " in text.too_long


def test_options_that_cut_or_exclude_all_conversations_are_refused(chat, tmp_path):
    for packing in ("stream", "best_fit"):
        with pytest.raises(UserError, match=f"packing={packing} would cut in two; give --data.packing=whole"):
            open_text(DataConfig(str(chat), packing=packing), 290, LENGTH, 1, tmp_path)
    sizes = [len(one) for part in ("train", "val") for one in tokens_of(chat, part)]
    lengths = f"half of all have at most {int(np.median(sizes))} tokens, and the longest {max(sizes)}"
    advice = "a larger --batch.sequence_length, or --data.too_long=cut; documents of more than 5 tokens are left out"
    with pytest.raises(UserError, match=rf"gives 0 rows of 4 tokens .*{advice}.*; {lengths}$"):
        opened(chat, tmp_path, 4, too_long="drop")
    with pytest.raises(UserError, match=rf"{chat}: in its \d+ rows of 4 tokens no token of an assistant is left"):
        opened(chat, tmp_path, 4, too_long="cut")


def test_a_mixture_with_text_has_the_weights_of_each(chat, tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"some words of {i} and more " * (i + 1))
    prepare(Preparation(source=f"{tmp_path}/*.txt", tokenizer=f"{chat}/tokenizer"), tmp_path / "text")
    text = opened(f"0.5:{chat},0.5:{tmp_path}/text", tmp_path, mask_documents=True)
    batches = StepBatches(text.train, text.mixture, 0, (1, 8, LENGTH), np.arange(8), text.document_bos)
    batch, parts = batches[0], [part for part, _ in batches.row_numbers(0)]
    assert Counter(parts) == {0: 4, 1: 4}
    for part, inputs, weights in zip(parts, batch["inputs"][0], batch["weights"][0]):
        assert (weights.sum() < 0.9 * (inputs > 0).sum()) if part == 0 else (weights[inputs > 0] == 1).all()
    assert "made " in text.too_long and "; text " in text.too_long
    assert max(batches[step]["segment_ids"].max() for step in range(10)) > 1
