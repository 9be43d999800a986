"""Test the table that the program prints, and that its programs read the same text; not its figures."""

import sys

import pyarrow.parquet

from bench import preparation
from bench.preparation import Program, Text, tokensum, write_text
from data.prepare.preparation import Preparation, prepare
from tests.data.preparations import facts_of, write_files

NAMES = ("tokensum: tokens", "nanochat: tokens")
CONTENTS = {f"{i}.txt": " ".join(map(str, range(1000 * i, 1000 * i + 2000))) for i in range(10)}


def test_the_table_has_medians_by_program_and_names_those_that_are_missing(tmp_path, monkeypatch, capsys):
    turns = iter([(1.0, 2.0), (4.0, 5.0), (2.0, 4.0)] * 99)

    def measured(program: Program) -> tuple[float, float]:
        if "tokensum" not in program.name:
            raise ImportError(f"no module for {program.name}")
        return next(turns)

    source = write_files(tmp_path, CONTENTS)
    monkeypatch.setattr(preparation, "measured", measured)
    monkeypatch.setattr(preparation, "programs", lambda *_: (Program(name, 8.0, "MB", len, ()) for name in NAMES))
    monkeypatch.setattr(sys, "argv", ["preparation", f"--source={source}", "--vocab_size=300", "--rounds=3"])
    assert preparation.main() == 0
    printed = capsys.readouterr().out
    assert "| tokensum: tokens | MB | 4 | 2 |" in printed
    assert "not here: nanochat: tokens (no module for nanochat: tokens)" in printed


def test_every_program_reads_the_same_documents(tmp_path):
    source = write_files(tmp_path / "source", CONTENTS)
    text = Text(tmp_path)
    megabytes = write_text(source, text)
    assert megabytes == sum(map(len, CONTENTS.values())) / 1e6
    tables = [pyarrow.parquet.read_table(path) for path in sorted(text.parquet.iterdir())]
    assert sorted(one for table in tables for one in table["text"].to_pylist()) == sorted(CONTENTS.values())
    prepare(Preparation(source=str(text.parquet), vocab_size=300), text.prepared)
    before = {path.parent for path in tmp_path.rglob("dataset.json")}
    tokensum(text, 1, 0)()
    (made,) = {path.parent for path in tmp_path.rglob("dataset.json")} - before
    assert facts_of(made)["shards"] == facts_of(text.prepared)["shards"]
