"""Test that conversations are prepared like text, with the tokens of `render`."""

import json
import re
import sysconfig
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare.parts
from data.conversation import document_of, messages_of, render
from data.dataset import open_text
from data.prepare.chat_formats import unknown
from data.prepare.listing import find_corpus, hold_out
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import hash_share
from data.tokenizer import CHAT_TOKENS, load_tokenizer
from data.tokenizer_formats import convert_tiktoken
from evaluation.texts import read_documents
from options.schema import DataConfig
from system.errors import UserError
from tests.data import nanochat_conversations
from tests.data.preparations import facts_of, tokens_of

U, A = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
SOME = [one for one in nanochat_conversations.conversations(2, 240) if len(messages_of(one)) > 1]
PLAIN = [one for one in SOME if all(isinstance(message["content"], str) for message in one["messages"])]


def write_lines(path: Path, records: list) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_documents_are_rendered_and_held_out_by_text(tmp_path, monkeypatch):
    monkeypatch.setattr(data.prepare.parts, "TASK_BYTES", (9_000, 9_000))
    write_lines(tmp_path / "chat" / "a.jsonl", [*SOME[:150], SOME[1]])
    write_lines(tmp_path / "chat" / "b.jsonl", [one["messages"] for one in SOME[150:]])  # nanochat's format
    settings = Preparation(source=f"{tmp_path}/chat", vocab_size=300, val_fraction=0.2, conversations=True)
    settings = replace(settings, deduplicate=True)
    prepare(settings, tmp_path / "out", workers=1)
    facts, tokenizer = facts_of(tmp_path / "out"), load_tokenizer(tmp_path / "out" / "tokenizer")
    assert facts["made_from"]["conversations"] is True and sum(facts["skipped"].values()) == 1
    for part, is_val in (("train", False), ("val", True)):
        some = [one for one in SOME if (hash_share(document_of(one)) < 0.2) == is_val]
        made = [tokens.tolist() for tokens in tokens_of(tmp_path / "out", part)]
        assert len(some) > 20 and sorted(made) == sorted(render(tokenizer, messages_of(one)) for one in some)
        assert facts[part]["bytes"] == sum(len(document_of(one).encode()) for one in some)


def test_messages_have_a_column_of_any_name_and_times_beside_them(tmp_path):
    messages = [[{**message, "at": date(2026, 1, 1)} for message in one["messages"]] for one in PLAIN]
    pq.write_table(pa.table({"turns": messages}), tmp_path / "a.parquet", row_group_size=7)
    write_lines(tmp_path / "b.jsonl", [{"turns": one["messages"]} for one in PLAIN])
    corpus = find_corpus(str(tmp_path), "turns", conversations=True)
    for file in corpus.files:
        assert [document.text for document in corpus.documents(file)] == [document_of(one) for one in PLAIN], file.name


BAD = {
    "no list of messages": {"messages": {"text": "x"}},
    "its messages are text, and not in JSON; write them with json.dumps": {"messages": str([U, A])},
    "no message of a user": [],
    "no message of an assistant": [U],
    "the conversation begins with the message of assistant; roles alternate from the user's": [A, A],
    "the conversation has, after the assistant's, another message of assistant; roles alternate from the user's": [
        U,
        A,
        A,
    ],
    "message 2 (assistant) has no text as its content": [U, {"role": "assistant", "content": None}],
    "message 1 (user) has a part of the type 'python', which is no text": [
        *({"role": "user", "content": [{"type": "python", "text": "x"}]}, A),
    ],
    "message 3 has the role 'critic', not developer, function, system, user, assistant, tool": [
        *(U, A, {"role": "critic", "content": "x"}),
    ],
    "the conversation has, after the user's, another message of user; roles alternate from the user's": [U, U, A],
    "message 4 (assistant) is empty": [U, A, U, {"role": "assistant", "content": ""}],
    "message 2 (assistant) has another weight than 1: every answer is learned": [U, A | {"weight": 0}],
    "message 2 (assistant) has reasoning_content, which cannot be learned": [U, A | {"reasoning_content": "hm"}],
    "message 1 (user) has a part of the type 'image_url', which is no text": [
        *({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, A),
    ],
    "message 2 (tool) is no answer to an assistant's call": [U, {"role": "tool", "content": "x"}, A],
    "message 1 (user) has tool_calls, which only an assistant makes": [U | {"function_call": {"arguments": "{}"}}, A],
    "message 2 (assistant) has a call of a tool whose arguments are no object of JSON": [
        *(U, {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": "w("}}]}),
    ],
    "instruction, output are not as in Alpaca": {"instruction": 7, "output": "y"},
    "question, choices, answer are not as in MMLU": {"question": "x", "choices": ["1"] * 4, "answer": 4},
    f"{unknown(['question', 'chosen'])}": {"question": "x", "chosen": "y"},
    "invalid Unicode (a lone surrogate)": [U, {"role": "assistant", "content": "\ud800"}],
}


def test_a_bad_conversation_is_named_or_skipped_and_counted_by_kind(tmp_path):
    source = write_lines(tmp_path / "all.jsonl", [*PLAIN, *BAD.values()])
    for number, (problem, bad) in enumerate(BAD.items()):
        corpus = find_corpus(write_lines(tmp_path / f"{number}.jsonl", [*PLAIN, bad]), conversations=True)
        with pytest.raises(UserError) as error:
            list(corpus.documents(corpus.files[0]))
        assert f"{number}.jsonl line {len(PLAIN) + 1}: {problem}; correct it" in str(error.value)
    prepare(Preparation(source=source, vocab_size=270, conversations=True, on_error="skip"), tmp_path / "out")
    kinds = [re.sub(r"^message \d", "a message", problem) for problem in BAD]
    assert facts_of(tmp_path / "out")["skipped"] == dict.fromkeys(kinds, 1)


def test_text_given_as_conversations_is_refused_and_vice_versa(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", PLAIN)
    pq.write_table(pa.table({"messages": [[U, A]] * 9}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["x", "y"]}), tmp_path / "c.parquet")
    need = "data.prepare's --text_column names another, and its --conversations reads messages"
    refused = {
        (lines, False): f"a.jsonl line 1: no text under 'text'; {need}",
        (f"{tmp_path}/b.parquet", False): f"no column 'text', but messages; {need}",
        (f"{tmp_path}/c.parquet", True): "no conversation in the columns text; known are messages; ",
        (str(Path(__file__).parent), True): "no file of conversations found there; left out: .* give `chat-stdlib`",
    }
    for (source, conversations), message in refused.items():
        with pytest.raises(UserError, match=message):
            prepare(Preparation(source=source, vocab_size=270, conversations=conversations), tmp_path / "out")
    with pytest.raises(UserError, match=need):
        open_text(DataConfig(lines, packing="whole"), 270, 64, 1, tmp_path / "cache")


def test_a_given_tokenizer_gets_the_tokens_that_it_lacks(tmp_path, capsys):
    own = convert_tiktoken(nanochat_conversations.RANKS, ".", {"<|bos|>": 269})
    own.save(tmp_path / "tokenizer")
    settings = Preparation(source=write_lines(tmp_path / "a.jsonl", SOME), conversations=True)
    prepare(replace(settings, tokenizer=f"{tmp_path}/tokenizer"), tmp_path / "out")
    assert "lacks special tokens of conversations: ids 270 to 277 are added" in capsys.readouterr().err
    grown = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert [grown.special_tokens[name] for name in CHAT_TOKENS] == [*range(270, 278)]
    assert grown.vocab_size == 278 and not grown.token_bytes[270:].any()
    assert grown.encode(["some words<|assistant_end|>"]) == own.encode(["some words<|assistant_end|>"])
    prepare(replace(settings, tokenizer=f"{tmp_path}/out/tokenizer"), tmp_path / "again")
    assert "lacks" not in capsys.readouterr().err
    with pytest.raises(UserError, match="is conversations, not text; a run on them has"):
        read_documents(f"{tmp_path}/out", 9, "text", tmp_path / "cache")


def write_library(root: Path, monkeypatch) -> None:
    """Make four modules that stand for Python's standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(root))
    for name in ("a", "b", "package/__init__", "package/c", "ctypes/test/d"):
        functions = "".join(f'def f{i}(x: int) -> int:\n    """Return {i} + x, for {name}."""\n' for i in range(9))
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").write_text(f'"""About {name}."""\n{functions}')


def test_chat_stdlib_is_prepared_in_the_cache_from_the_files_of_the_library(tmp_path, monkeypatch):
    write_library(tmp_path / "lib", monkeypatch)
    monkeypatch.setattr("data.dataset_folder._prepare_raw", data.prepare.preparation.prepare_raw)
    corpus = hold_out(find_corpus("chat-stdlib"))  # a module of tests is no published split
    names = [document.name for file in corpus.files for document in corpus.documents(file)]
    assert {name.partition(" ")[0] for name in names} == {"a.py", "b.py", "package/__init__.py", "package/c.py"}
    assert "package/c.py row 2" in names and len(names) > 30
    text = open_text(DataConfig("chat-stdlib", packing="whole"), 300, 256, 1, tmp_path / "cache")
    assert sum(text.train[0][i]["weights"].sum() for i in range(len(text.train[0]))) > 100
