"""Test that conversations of published sets are recognized by their columns, and become the right tokens."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data.conversation import render
from data.packing import learned
from data.prepare.corpus import GREETING
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from system.errors import UserError
from tests.data.preparations import facts_of, jsonl, write_files

TOKENIZER = train_tokenizer(["some words, and others"], 266)
U, A, X = (
    {"role": role, "content": text} for role, text in (("user", "weather?"), ("assistant", "12 C"), ("user", "x"))
)
OLD = {"name": "w", "arguments": "{}"}
CALL = [{"id": "1", "type": "function", "function": OLD}]
SILENT = {"role": "assistant", "content": None, "tool_calls": CALL}
TURN = (
    "<|user_start|>{}<|user_end|><|assistant_start|>[{}<|assistant_end|>]"  # an assistant's tokens, in [], are learned
)
ASKED, CALLED = TURN.format("weather?", "12 C"), "<|python_start|>{}<|python_end|>"
CALCULATED = "<|python_start|>{}<|python_end|>]<|output_start|>{}<|output_end|>["
CHOICES = (
    "Multiple Choice question: 1 + 1?\n- 1=A\n- 2=B\n- 3=C\n- 4=D\n\n"
    "Respond only with the letter of the correct answer."
)


def chat(*messages: dict) -> dict:
    return {"messages": [*messages]}


def sharegpt(**turns: str) -> dict:
    return {"id": "7", "conversations": [{"from": name, "value": text} for name, text in turns.items()]}


# Each form: a record, and its tokens after the BOS.
FORMS = {
    "messages": (chat(U, A), ASKED),
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, TURN.format("a", "b")),
    "alpaca, an input": ({"instruction": "a", "input": "c", "output": "b", "text": "x"}, TURN.format("a\n\nc", "b")),
    "dolly": ({"instruction": "a", "context": "c", "response": "b", "category": "q"}, TURN.format("a\n\nc", "b")),
    "sharegpt": (sharegpt(human="hi", gpt="yo"), TURN.format("hi", "yo")),
    "sharegpt, a system": (sharegpt(system="s", human="hi", gpt="yo"), TURN.format("s\n\nhi", "yo")),
    "developer": (chat({"role": "developer", "content": "s"}, U, A), TURN.format("s\n\nweather?", "12 C")),
    "content_parts_openai": (chat(U | {"content": [{"type": "text", "text": t} for t in ("wea", "ther?")]}, A), ASKED),
    "tool_calls": (
        chat(U, A | {"content": "Calling.", "tool_calls": CALL}, X, A),
        TURN.format("weather?", f"Calling.{CALLED}") + TURN.format("x", "12 C"),
    ),
    "function_call": (
        chat(U, A | {"content": "Calling.", "function_call": OLD}),
        TURN.format("weather?", f"Calling.{CALLED}"),
    ),
    "null_content": (chat(U, SILENT, X, A), TURN.format("weather?", CALLED) + TURN.format("x", "12 C")),
    "arguments as an object": (
        chat(U, {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"é": 3}}}]}),
        TURN.format("weather?", CALLED.replace("{}", '{"é": 3}')),
    ),
    "tool_role": (
        chat(U, A | {"content": "let me see"}, {"role": "tool", "content": "12 C"}, A),
        TURN.format("weather?", "let me see]<|output_start|>12 C<|output_end|>[12 C"),
    ),
    "two calls and their results": (
        chat(U, SILENT | {"tool_calls": CALL * 2}, *({"role": "tool", "content": result} for result in "xy"), A),
        TURN.format(
            "weather?",
            f"{CALLED * 2}]<|output_start|>x<|output_end|><|output_start|>y<|output_end|>[12 C",
        ),
    ),
    "leading answer": (chat(A, U, A), ASKED),
    "mmlu": ({"question": "1 + 1?", "choices": [*"1234"], "answer": 1, "subject": ""}, TURN.format(CHOICES, "B")),
    "gsm8k": (
        {"question": "How many?", "answer": "48/2 = <<48/2=24>>24.\nSo <<1+1>>2.\n#### 2"},
        TURN.format(
            "How many?", f"48/2 = {CALCULATED.format('48/2', '24')}24.\nSo {CALCULATED.format('1+1', '')}2.\n#### 2"
        ),
    ),
}


def spelled(expected: str) -> list[tuple[int, bool]]:
    """Return the tokens of a text with special tokens, and whether they are learned: those inside brackets."""
    tokens, is_learned = [(TOKENIZER.bos, False)], False
    for number, piece in enumerate(re.split(r"(<\|\w+\|>|[\[\]])", expected)):
        if number % 2 == 0:
            tokens += [(token, is_learned) for token in TOKENIZER.encode([piece])[0]]
        elif piece in "[]":
            is_learned = piece == "["
        else:
            tokens.append((TOKENIZER.special_tokens[piece], is_learned))
    return tokens


def documents(path: Path) -> list[list]:
    """Return the conversations of a file, as messages."""
    corpus = find_corpus(str(path), conversations=True)
    return [json.loads(document.text) for document in corpus.documents(corpus.files[0])]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_its_tokens_of_which_an_assistant_s_are_learned(tmp_path, form):
    record, expected = FORMS[form]
    write_files(tmp_path, {"a.jsonl": jsonl(record, record), "b.json": "\ufeff" + json.dumps([record, record])})
    paths = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    if (isinstance(record, dict) and len(record) > 1) or form in ("sharegpt", "developer", "tool_role"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 2), tmp_path / "c.parquet")
        paths.append(tmp_path / "c.parquet")
    if isinstance(record, dict):
        flat = {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
        paths += [tmp_path / name for name in ("flat.jsonl", "flat.parquet", "flat.csv", "flat.tsv")]
        write_files(tmp_path, {"flat.jsonl": jsonl(flat, flat)})
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([flat] * 2), tmp_path / "flat.parquet")
        for path, separator in zip(paths[-2:], ",\t"):
            with path.open("w", newline="") as file:
                csv.writer(file, delimiter=separator).writerows([flat.keys(), flat.values(), flat.values()])
    for path in paths:
        conversations = documents(path)
        assert len(conversations) == 2
        for messages in conversations:
            tokens = render(TOKENIZER, messages)
            assert list(zip(tokens, learned(np.array(tokens), TOKENIZER.special_tokens).tolist())) == spelled(expected)


def test_the_format_and_the_share_left_out_are_printed_and_counted(tmp_path, capfd):
    rows = [{"instruction": f"a{i}", "output": f"b{i}"} for i in range(16)]
    bad = {"messages": [U, A | {"reasoning_content": "hm"}]}
    write_files(tmp_path, {"a.jsonl": jsonl(*rows, {"messages": [A, U, A]}, bad, bad, bad)})
    settings = Preparation(source=f"{tmp_path}/a.jsonl", conversations=True, on_error="skip", vocab_size=266)
    prepare(settings, tmp_path / "out")
    facts, said = facts_of(tmp_path / "out"), capfd.readouterr().err
    lost = "a message (assistant) has reasoning_content, which cannot be learned"
    assert facts["skipped"] == {lost: 3, GREETING: 1}
    assert facts["train"]["documents"] + facts["val"]["documents"] == 17
    assert "conversations are made of the columns of Alpaca: instruction, output" in said
    lines = f"  3 (15%): {lost} (first: a.jsonl line 18)\n  1 (5%): {GREETING} (first: a.jsonl line 17)\n"
    assert f"left out, of 20 document(s):\n{lines}" in said


@pytest.mark.parametrize("content", ['{"data": []}', "{}\n{}\n"])
def test_a_json_of_something_else_than_an_array_is_refused(tmp_path, content):
    write_files(tmp_path, {"a.json": content})
    with pytest.raises(UserError, match=r"a\.json is no array of conversations; .* call it \.jsonl"):
        documents(tmp_path / "a.json")


def test_extensions_of_text_are_refused_for_conversations(tmp_path):
    write_files(tmp_path, {"a.ndjson": "{}\n{}\n"})
    with pytest.raises(UserError, match=r"--text_extensions is for text, and conversations are \.jsonl, .*\.csv or"):
        find_corpus(str(tmp_path), conversations=True, text_extensions=".ndjson")
    with pytest.raises(UserError, match=r"no file of conversations found there; left out: 1 \.ndjson; give .*\.tsv on"):
        find_corpus(str(tmp_path), conversations=True)
