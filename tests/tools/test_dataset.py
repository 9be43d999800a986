"""Test what tools.dataset prints about datasets, and the rows of a batch."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from data.dataset import open_text
from data.dataset_folder import Dataset, open_dataset
from data.order import RowSequence
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from data.prepare.shard_writer import write_shard
from data.shards import Shard
from options.schema import DataConfig
from system.errors import UserError
from tests.run_folders import write_run
from tools import dataset as command


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dataset", *map(str, words)])
    return command.main()


@pytest.fixture
def documents(tmp_path) -> Dataset:
    """Return a dataset of 7 training documents and 2 held-out ones, with duplicates. Token 0 is the BOS."""
    tokenizer = train_tokenizer(["some words of text " * 50], 266)
    written = [[0, 9, 10, 11], [0, 12], [0, 9, 10, 11], [0, 13, 14, 15, 16, 9, 10, 11, 12], [0, 12], [0, 12], [0, 13]]

    def shard(name: str, texts: list[list[int]]) -> Shard:
        write_shard(tmp_path / f"{name}.bin", np.concatenate(texts), np.array([*map(len, texts)]), 266)
        return Shard(tmp_path / f"{name}.bin")

    train = [shard("train_0", written[:4]), shard("train_1", written[4:])]
    shards = {"train": train, "val": [shard("val_0", [[0, 13], [0, 9, 9]])]}
    return Dataset(tmp_path, shards, tokenizer, "1234", "by hand", 2)


def test_documents_bytes_and_duplicates_are_counted(documents, monkeypatch):
    monkeypatch.setattr(command, "AT_ONCE", 2)
    train, val = (command.read_documents(documents, part) for part in ("train", "val"))
    assert train.tokens.tolist() == [4, 2, 4, 9, 2, 2, 2] and val.tokens.tolist() == [2, 3]
    assert train.bytes.tolist() == [3, 1, 3, 8, 1, 1, 1]
    text = command.describe(documents, "here", 6)
    assert "3 training documents repeat an earlier one; 1 held-out are trained on" in text
    assert "7 documents, 25 tokens, 18 bytes" in text and "longest 9" in text


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_the_cost_of_packing_equals_the_count_of_its_rows(documents, packing, tmp_path):
    """Count at every position of every row."""
    rows = documents.rows("train", DataConfig(packing=packing), 6, tmp_path / "plans")
    counted, padding, cut = command.pack(documents, command.read_documents(documents, "train"), packing, 6)
    weights = np.array([rows[i]["weights"] for i in range(len(rows))])
    assert counted == len(rows) and padding == pytest.approx(np.mean(weights == 0))
    # Documents start at 0, 4, 6, 10, 19, 21 and 23. Six fit 6 positions; `stream` cuts the one at 23 in two.
    assert cut == pytest.approx(1 / 6 if packing == "stream" else 0)


def test_conversations_mark_the_tokens_that_are_learned(tmp_path, monkeypatch, capsys):
    turn = lambda i: [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "answer"}]
    lines = [json.dumps({"messages": turn(i) * (1 + i % 3)}) for i in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    source = f"{tmp_path}/chat.jsonl"
    prepare(Preparation(source=source, vocab_size=266, val_fraction=0.3, conversations=True), tmp_path / "data")
    assert run(monkeypatch, tmp_path / "data", "--sequence_length=40") == 0
    printed = capsys.readouterr().out
    assert re.search(r"learned   [\d,]+ of [\d,]+ training tokens", printed) and "whole  " in printed
    data = open_dataset(str(tmp_path / "data"), DataConfig(), 0, tmp_path / "cache")
    count = sum(command.read_documents(data, part).learned.sum() for part in ("train", "val"))
    (answer,) = data.tokenizer.encode(["answer"])
    assert "stream" not in printed and count == 120 * (len(answer) + 1)  # the end token included
    assert run(monkeypatch, tmp_path / "data", "--sequence_length=16", "--step=1", "--rows=1") == 0
    assert re.search(r"'q\d+«answer»", capsys.readouterr().out)


def test_a_run_in_a_bucket_is_that_of_the_folder(tmp_path, monkeypatch, capsys, gcs):
    """A jump of the loss names this command, with the run's folder wherever it is."""
    (tmp_path / "one.txt").write_text("some words of text\n" * 4000)
    made = tmp_path / "data"
    prepare(Preparation(source=str(tmp_path / "one.txt"), vocab_size=273, val_fraction=0.3), made)
    folder = write_run(tmp_path / "run", batch=64, data=DataConfig(str(made)), length=16)
    # A URL of its own: a process copies the record of a run once.
    for path in filter(Path.is_file, folder.rglob("*")):
        gcs.put(f"runs/listed/{path.relative_to(folder)}", path.read_bytes())
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path / "cache"))
    assert run(monkeypatch, folder, "--step=3") == run(monkeypatch, "gs://bucket/runs/listed", "--step=3") == 0
    lines = capsys.readouterr().out.splitlines()
    half = len(lines) // 2
    assert lines[0] == "step 3: 4 rows of 16 tokens, of which 4 follow" and lines[:half] == lines[half:]
    for missing in ("gs://bucket/runs/none", "s3://bucket/text"):
        with pytest.raises(UserError, match=f"{missing} is not a folder here"):
            run(monkeypatch, missing, "--step=3")
    assert run(monkeypatch, made, "--step=3", "--sequence_length=16") == 0
    assert "step 3: 4 rows of 16 tokens, of which 4 follow" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--step=0 cannot work: "):
        run(monkeypatch, made, "--step=0")


def test_a_step_is_counted_as_in_the_log(tmp_path, monkeypatch, capsys):
    """metrics.jsonl calls the first step 1, and a message about a step is followed by this command."""
    (tmp_path / "one.txt").write_text("some words of text\n" * 4000)
    made, batch = tmp_path / "data", 4
    prepare(Preparation(source=str(tmp_path / "one.txt"), vocab_size=273, val_fraction=0.3), made)
    folder = write_run(tmp_path / "run", batch=batch * 16, data=DataConfig(str(made)), length=16)
    text = open_text(DataConfig(str(made)), 273, 16, batch, tmp_path / "cache")
    order = RowSequence(text.train, text.mixture, 0)
    for step in (1, 2, 10):
        rows = range((step - 1) * batch, step * batch)
        for place in (folder, made):
            assert run(monkeypatch, place, f"--step={step}", "--sequence_length=16") == 0
            shown = re.findall(r"of the step, row ([\d,]+) of ", capsys.readouterr().out)
            numbers = [int(number.replace(",", "")) for number in shown]
            assert numbers == [order[row][1] for row in rows], (step, place)
