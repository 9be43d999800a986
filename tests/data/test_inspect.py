import json
import os
import sys
from pathlib import Path

import pytest

import data.inspect
from configs.schema import UserError
from data.prepare import Preparation, prepare
from run.runtime import cache_dir


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "one.txt").write_text("some words of text\n" * 4000)
    prepare(Preparation(source=str(folder / "one.txt"), vocab_size=265, val_fraction=0.3), folder / "data")
    return folder / "data"


def inspect(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["inspect", *map(str, words)])
    return data.inspect.main()


SIZES = ("--sequence_length=16", "--tokens_per_step=64")


def test_the_batch_of_a_step_is_shown(made, monkeypatch, capsys):
    assert inspect(monkeypatch, made, "--step=3", *SIZES) == 0
    assert "step 3: 4 rows of 16 tokens, of which 4 follow" in capsys.readouterr().out
    assert (made / "document-lengths.png").exists()


@pytest.mark.parametrize(
    "option",
    [
        *("--step=-1", "--rows=-1", "--rows=0", "--sequence_length=0", "--sequence_length=-4", "--sequence_length=1"),
        *("--tokens_per_step=0", "--tokens_per_step=-64", "--tokens_per_step=15", "--seed=-1", f"--seed={2**32}"),
        *("--picture=x.docx", "--picture=x", f"--step={2**63}"),
    ],
)
def test_an_option_that_cannot_work_is_named(made, monkeypatch, option):
    with pytest.raises(UserError, match=f"^{option} cannot work: "):
        inspect(monkeypatch, made, "--step=0", *SIZES, option)


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def refuse(_: Figure, path: Path, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Figure, "savefig", refuse)


def test_where_the_picture_cannot_be_written_the_rest_is_shown(made, monkeypatch, capsys):
    read_only(monkeypatch)
    assert inspect(monkeypatch, made, "--step=0", *SIZES) == 0
    said = capsys.readouterr()
    assert "document-lengths.png cannot be written (Permission denied); give --picture=PATH" in said.err
    assert "step 0: 4 rows" in said.out
    with pytest.raises(UserError, match=r"--picture=/x/y\.png cannot be written"):
        inspect(monkeypatch, made, "--picture=/x/y.png")


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"config": '])
def test_a_folder_whose_config_is_damaged_is_named(tmp_path, monkeypatch, record):
    (tmp_path / "config.json").write_text(record)
    with pytest.raises(UserError, match=r"config\.json is no run's record"):
        inspect(monkeypatch, tmp_path)


def test_without_a_home_the_cache_must_be_named(monkeypatch):
    monkeypatch.delenv("TOKENSUM_CACHE")
    monkeypatch.setenv("TOKENSUM_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(UserError, match="set TOKENSUM_CACHE"):
        cache_dir()


def test_out_in_the_home_of_nobody_is_named(made, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prepare", f"--source={made.parent}/one.txt", "--out=~nobody-of-this-name/x"])
    with pytest.raises(UserError, match="--out=~nobody-of-this-name/x"):
        data.prepare.main()


def test_prepare_writes_one_line_of_json_to_its_output(made, tmp_path, monkeypatch, capfd):
    source = f"--source={made.parent}/one.txt"
    monkeypatch.setattr(sys, "argv", ["prepare", source, f"--out={tmp_path / 'x'}", "--vocab_size=262"])
    assert data.prepare.main() == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["train"]["documents"] > 1
    assert os.listdir(tmp_path) == ["x"]
