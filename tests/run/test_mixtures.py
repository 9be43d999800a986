"""Test runs whose shares of a mixture change: which rows they read, whatever ends them in between."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from data.dataset import open_text
from data.loader import train_batches
from data.packing import Rows
from data.prepare.preparation import Preparation, prepare
from options.schema import DataConfig
from run.folder import RunFolder
from system.errors import UserError
from tests.commands import ROOT, run
from tests.run.short_runs import CONFIG, losses
from tools import dataset

LENGTH = 32
STEPS = [
    ("--steps=4", "--data.source=0.75:a,0.25:b"),
    ("--steps=6", "--data.source=0.5:a,0.5:b"),
    ("--steps=10", "--data.source=0.25:a,0.25:b,0.5:c"),  # one is added
    ("--steps=14", "--data.source=0.5:c,0.5:a"),  # one has left
]
"""The options of each start of a run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a config and three datasets of one tokenizer."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "tiny.py").write_text(CONFIG.replace("every_steps=2)", "every_steps=2, keep=99)"))
    words = (ROOT / "tests" / "words.txt").read_text().split()
    for name, step in {"a": 7, "b": 11, "c": 13}.items():
        (folder / f"{name}-text").mkdir()
        for i in range(30):
            document = " ".join(words[(i + 50 + step * j) % len(words)] for j in range(60))
            (folder / f"{name}-text/{i}.txt").write_text(f"{name} {i} {document}")
        given = {"vocab_size": 300} if name == "a" else {"tokenizer": str(folder / "a/tokenizer")}
        prepare(Preparation(source=str(folder / f"{name}-text"), val_fraction=0.2, **given), folder / name)
    return folder


@pytest.fixture
def rows(folder) -> dict[str, Rows]:
    """Return the rows of each dataset."""
    texts = {name: open_text(DataConfig(str(folder / name)), 300, LENGTH, 1, folder / "cache") for name in "abc"}
    return {name: text.train[0] for name, text in texts.items()}


@pytest.fixture
def read(rows, monkeypatch) -> dict[str, list[int]]:
    """Return the numbers of the rows that steps take from each dataset, from now on."""
    of_row = {
        part[number]["inputs"].tobytes(): (name, number) for name, part in rows.items() for number in range(len(part))
    }
    taken = defaultdict(list)

    def noted(*arguments) -> Iterator[dict]:
        for batch in train_batches(*arguments):
            for row in np.asarray(batch["inputs"]).reshape(-1, LENGTH):
                name, number = of_row[row.tobytes()]
                taken[name].append(number)
            yield batch

    monkeypatch.setattr("run.text.train_batches", noted)
    return taken


def start(monkeypatch, folder: Path, *arguments: str) -> int:
    """Return the exit code of train.py, in this process, on one device."""
    monkeypatch.chdir(folder)
    return run("train", monkeypatch, "--config=tiny.py", "--accept_changes", *arguments, devices=1)


def repeated(rows: list[int]) -> int:
    return len(rows) - len({*rows})


@pytest.mark.medium
def test_no_row_repeats_over_changes_kills_and_a_way_back(folder, rows, read, monkeypatch, capsys):
    for options in STEPS:
        assert start(monkeypatch, folder, "--run_dir=changed", *options) == 0
    assert {name: len(rows) for name, rows in read.items()} == {"a": 12 + 4 + 4 + 8, "b": 4 + 4 + 4, "c": 8 + 8}
    assert not any(map(repeated, read.values()))
    epochs = [line["epochs"] for line in RunFolder(folder / "changed").metrics() if "epochs" in line][-1]
    assert epochs == {name: len(read[name]) / len(rows[name]) for name in "ac"}
    starts = [event for event in RunFolder(folder / "changed").events.read() if event["event"] == "start"]
    assert [event["mixture"]["first_row"] for event in starts] == [0, 16, 24, 40]
    assert list(starts[-1]["mixture"]["rows_before"].values()) == [20, 12, 8]
    monkeypatch.setattr("sys.argv", ["dataset", "changed", "--step=12", "--rows=4"])
    capsys.readouterr()
    assert dataset.main() == 0
    shown = re.findall(r"of the step, row (\d+) of \S*/(\w):", capsys.readouterr().out)
    assert {(name, int(number)) for number, name in shown} == {("a", row) for row in read["a"][22:24]} | {
        ("c", row) for row in read["c"][10:12]
    }
    monkeypatch.setattr("sys.argv", ["dataset", "changed", "--step=10"])
    with pytest.raises(UserError, match="took it before a change of --data"):
        dataset.main()

    undisturbed = {name: list(rows) for name, rows in read.items()}
    for name in "abc":
        read[name].clear()
    assert start(monkeypatch, folder, "--run_dir=disturbed", *STEPS[0]) == 0
    for options in STEPS[1:]:
        with monkeypatch.context() as patch:  # after the first step with these shares, before it is saved
            patch.setattr("run.session.Session.save_if_due", Mock(side_effect=RuntimeError("killed")))
            assert start(patch, folder, "--run_dir=disturbed", *options) == 1
        assert start(monkeypatch, folder, "--run_dir=disturbed", *options) == 0
    assert losses(folder / "disturbed") == losses(folder / "changed")

    for name in "abc":
        read[name].clear()
    back = ("--run_dir=changed", "--resume_step=6", "--data.source=0.5:b,0.5:c", "--steps=10")
    assert start(monkeypatch, folder, *back) == 0
    assert not read["a"] and not {*read["b"]} & {*undisturbed["b"][:8]}
    assert read["b"][:4] == undisturbed["b"][8:] and read["c"] == undisturbed["c"][:8]
