"""Test that conversations of other schemas are converted as nanochat converts them."""

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data.conversation import messages_of
from data.prepare.chats import main
from hosts.runtime import run_command

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


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["chats", *words])
    run_command(main)


def converted(monkeypatch: pytest.MonkeyPatch, folder: Path, schema: str, columns: dict | None = None) -> list:
    """Return the conversations that the command writes, of .parquet files with these columns."""
    words = []
    if columns:
        for part in range(2):  # two files: one row, then the others
            rows = {name: column[part : part + 1 + 9 * part] for name, column in columns.items()}
            pyarrow.parquet.write_table(pyarrow.table(rows), folder / f"train-0000{part}-of-00002.parquet")
        words = [f"--source={folder}/train*"]
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, schema, f"--out={folder}/chats.jsonl", *words)
    assert not ended.value.code
    made = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    assert [messages_of(conversation) for conversation in made] == [conversation["messages"] for conversation in made]
    return made


def test_multiple_choice_and_calculations(tmp_path, monkeypatch):
    first, _ = converted(monkeypatch, tmp_path, "mmlu", MMLU)
    question = "Multiple Choice question: 1 + 1?\n- 1=A\n- 2=B\n- 3=C\n- 4=D\n\n"
    question += "Respond only with the letter of the correct answer."
    assert first["messages"] == [{"role": "user", "content": question}, {"role": "assistant", "content": "B"}]
    first, *_ = converted(monkeypatch, tmp_path, "gsm8k", GSM8K)
    parts = [(part["type"], part["text"]) for part in first["messages"][1]["content"]]
    assert parts == [
        ("text", "48/2 = "),
        ("python", "48/2"),
        ("python_output", "24"),
        ("text", "24.\nSo "),
        ("python", "48+24"),
        ("python_output", "72"),
        ("text", "72.\n#### 72"),
    ]


@pytest.mark.parametrize(
    "words, columns, says",
    [
        (["mmlu", "--source=a.parquet"], GSM8K, "no column choices"),
        (["mmlu", "--source=a.parquet"], MMLU | {"answer": [1, 4]}, "row 2"),
        (["gsm8k", "--source=a.parquet"], {"question": ["?"], "answer": pyarrow.array([None], "string")}, "row 1"),
        (["gsm8k", "--source=broken.parquet"], GSM8K, "cannot be read as .parquet"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, columns, says):
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, *words, "--out=chats.jsonl")
    assert set(tmp_path.iterdir()) == before
    assert says in capsys.readouterr().err
