"""Test that conversations of published sets are recognized by their columns, and become the right tokens."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from configs.schema import UserError
from data.conversation import render
from data.packing import learned
from data.prepare.corpus import GREETING
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from tests.data.preparations import facts_of, jsonl, write_files

TOKENIZER = train_tokenizer(["some words, and others"], 266)
U, A = {"role": "user", "content": "weather?"}, {"role": "assistant", "content": "12 C"}
CALL = [{"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}]
OLD = {"name": "w", "arguments": "{}"}
ASKED = "<|user_start|>weather?<|user_end|><|assistant_start|>"

# Each form: a record, and its tokens after the BOS. An assistant's tokens, in [], are learned.
FORMS = {
    "messages": ({"messages": [U, A]}, f"{ASKED}[12 C<|assistant_end|>]"),
    "list": ([U, A], f"{ASKED}[12 C<|assistant_end|>]"),
    "text of JSON": ({"messages": json.dumps([U, A])}, f"{ASKED}[12 C<|assistant_end|>]"),
    "alpaca": (
        {"instruction": "a", "input": "", "output": "b"},
        "<|user_start|>a<|user_end|><|assistant_start|>[b<|assistant_end|>]",
    ),
    "alpaca with an input": (
        {"instruction": "a", "input": "c", "output": "b", "text": "x"},
        "<|user_start|>a\n\nc<|user_end|><|assistant_start|>[b<|assistant_end|>]",
    ),
    "dolly": (
        {"instruction": "a", "context": "c", "response": "b", "category": "qa"},
        "<|user_start|>a\n\nc<|user_end|><|assistant_start|>[b<|assistant_end|>]",
    ),
    "sharegpt": (
        {"id": "7", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        "<|user_start|>hi<|user_end|><|assistant_start|>[yo<|assistant_end|>]",
    ),
    "sharegpt with a system": (
        {"conversations": [{"from": who, "value": who} for who in ("system", "human", "gpt")]},
        "<|user_start|>system\n\nhuman<|user_end|><|assistant_start|>[gpt<|assistant_end|>]",
    ),
    "prompt_completion": (
        {"prompt": "a", "completion": "b"},
        "<|user_start|>a<|user_end|><|assistant_start|>[b<|assistant_end|>]",
    ),
    "prompt_completion of messages": ({"prompt": [U], "completion": [A]}, f"{ASKED}[12 C<|assistant_end|>]"),
    "developer": (
        {"messages": [{"role": "developer", "content": "be brief"}, U, A]},
        "<|user_start|>be brief\n\nweather?<|user_end|><|assistant_start|>[12 C<|assistant_end|>]",
    ),
    "content_parts_openai": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("wea", "ther?")]}, A]},
        f"{ASKED}[12 C<|assistant_end|>]",
    ),
    "tool_calls": (
        {"messages": [U, {"role": "assistant", "content": "Calling.", "tool_calls": CALL}, {**U, "content": "x"}, A]},
        f"{ASKED}[Calling.<|python_start|>{{}}<|python_end|><|assistant_end|>]"
        "<|user_start|>x<|user_end|><|assistant_start|>[12 C<|assistant_end|>]",
    ),
    "function_call": (
        {"messages": [U, {"role": "assistant", "content": "Calling.", "function_call": OLD}]},
        f"{ASKED}[Calling.<|python_start|>{{}}<|python_end|><|assistant_end|>]",
    ),
    "null_content": (
        {"messages": [U, {"role": "assistant", "content": None, "tool_calls": CALL}, {**U, "content": "x"}, A]},
        f"{ASKED}[<|python_start|>{{}}<|python_end|><|assistant_end|>]"
        "<|user_start|>x<|user_end|><|assistant_start|>[12 C<|assistant_end|>]",
    ),
    "arguments as an object": (
        {"messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"é": 3}}}]}]},
        f'{ASKED}[<|python_start|>{{"é": 3}}<|python_end|><|assistant_end|>]',
    ),
    "tool_role": (
        {"messages": [U, {**A, "content": "let me see"}, {"role": "tool", "content": "12 C"}, A]},
        f"{ASKED}[let me see]<|output_start|>12 C<|output_end|>[12 C<|assistant_end|>]",
    ),
    "two calls and their results": (
        {
            "messages": [
                *(U, {"role": "assistant", "content": None, "tool_calls": CALL * 2}),
                *({"role": "tool", "tool_call_id": "1", "content": result} for result in "xy"),
                A,
            ]
        },
        f"{ASKED}[{'<|python_start|>{}<|python_end|>' * 2}]<|output_start|>x<|output_end|>"
        "<|output_start|>y<|output_end|>[12 C<|assistant_end|>]",
    ),
    "leading answer": ({"messages": [A, U, A]}, f"{ASKED}[12 C<|assistant_end|>]"),
}
MMLU = {
    "question": ["1 + 1?", "Which\nis red?"],
    "subject": ["elementary_mathematics", ""],
    "choices": [["1", "2", "3", "4"], ["sky", "a leaf", "snow", "blood"]],
    "answer": [1, 3],
}
GSM8K = {
    "question": ["How many?", "And then?", "None?"],
    "answer": ["48/2 = <<48/2=24>>24.\nSo <<48+24=72>>72.\n#### 72", "<<1+1>>2 <<a=b=c>>\n#### 2", "#### 0"],
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
    for path in paths:
        conversations = documents(path)
        assert len(conversations) == 2
        for messages in conversations:
            tokens = render(TOKENIZER, messages)
            assert list(zip(tokens, learned(np.array(tokens), TOKENIZER.special_tokens).tolist())) == spelled(expected)


REFUSED = {
    "message 2 (assistant) has reasoning_content": {"messages": [U, A | {"reasoning_content": "hmm"}]},
    "message 2 (assistant) has another weight than 1": {"messages": [U, A | {"weight": 0}, U, A | {"weight": 1}]},
    "message 1 (user) has a part of the type 'image_url', which is no text": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, A]
    },
    "message 2 (tool) is no answer to an assistant's call": {"messages": [U, {"role": "tool", "content": "x"}, A]},
    "message 1 (user) has tool_calls, which only an assistant makes": {"messages": [U | {"tool_calls": CALL}, A]},
    "message 2 (assistant) has a call of a tool whose arguments are no object of JSON": {
        "messages": [U, {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": "w("}}]}]
    },
    "has the role 'bing', not developer": {"conversations": [{"from": "bing", "value": "x"}]},
    "no conversation in the columns question, chosen; known are messages; conversations; instruction, output;": {
        "question": "x",
        "chosen": "y",
    },
    "instruction, output are not as in Alpaca": {"instruction": 7, "output": "y"},
    "question, choices, answer are not as in MMLU": {"question": "x", "choices": ["1"] * 4, "answer": 4},
    "message 2 (assistant) is empty": {"instruction": "x", "output": ""},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(tmp_path, problem):
    write_files(tmp_path, {"a.jsonl": jsonl({"messages": [U, A]}, REFUSED[problem])})
    with pytest.raises(UserError, match=f"a.jsonl line 2: .*{re.escape(problem)}"):
        documents(tmp_path / "a.jsonl")


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
    assert "left out, of 20 document(s): " in said and f"3 {lost} (15%)" in said and f"1 {GREETING} (5%)" in said


def test_a_table_or_an_array_of_something_else_is_refused_with_what_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "chosen": ["y"]}), tmp_path / "a.parquet")
    write_files(tmp_path, {"b.json": '{"data": []}', "c.json": "{}\n{}\n"})
    says = {
        "a.parquet": "no conversation in the columns prompt, chosen; known are",
        "b.json": "is not an array of conversations",
        "c.json": "is not JSON: .*; one conversation a line: call it .jsonl",
    }
    for name, message in says.items():
        with pytest.raises(UserError, match=message):
            documents(tmp_path / name)


def converted(folder: Path, columns: dict) -> list:
    """Return the conversations of a .parquet with these columns."""
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "a.parquet")
    return documents(folder / "a.parquet")


def test_multiple_choice_and_calculations(tmp_path):
    first, _ = converted(tmp_path, MMLU)
    question = "Multiple Choice question: 1 + 1?\n- 1=A\n- 2=B\n- 3=C\n- 4=D\n\n"
    question += "Respond only with the letter of the correct answer."
    assert first == [{"role": "user", "content": question}, {"role": "assistant", "content": "B"}]
    first, *_ = converted(tmp_path, GSM8K)
    parts = [(part["type"], part["text"]) for part in first[1]["content"]]
    assert parts == [
        ("text", "48/2 = "),
        ("python", "48/2"),
        ("python_output", "24"),
        ("text", "24.\nSo "),
        ("python", "48+24"),
        ("python_output", "72"),
        ("text", "72.\n#### 72"),
    ]
