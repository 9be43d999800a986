"""Test runs that continue after a failure: nothing is lost silently or done twice."""

import json
import shutil
from pathlib import Path

import jax
import pytest

from data.tokenizer import load_tokenizer
from run.base import config_of_continued
from run.folder import RunFolder
from tests.commands import run, write_folder
from tests.run.short_runs import CONFIG, losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a config, text to train on, and a finished run."""
    folder = write_folder(tmp_path_factory.mktemp("user"), CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        assert start(patch, folder, "--run_dir=finished") == 0
    return folder


def start(monkeypatch, folder: Path, *arguments: str) -> int:
    """Return the exit code of train.py, in this process, on one device."""
    monkeypatch.chdir(folder)
    return run("train", monkeypatch, "--config=tiny.py", *arguments, devices=1)


def copy_of(folder: Path, name: str) -> Path:
    return Path(shutil.copytree(folder / "finished", folder / name))


def content(run_dir: Path) -> dict[str, bytes]:
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path): path.read_bytes() for path in files}


def test_a_run_continues_by_its_folder_alone_also_after_a_move(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "finished", tmp_path / "moved")
    assert run("train", monkeypatch, "--run_dir=moved", devices=1) == 0
    assert "is complete" in capsys.readouterr().out
    assert run("train", monkeypatch, "--run_dir=moved", "--steps=8", devices=1) == 2
    assert "\n  steps: 6 -> 8\n" in capsys.readouterr().err
    assert run("train", monkeypatch, "--run_dir=moved", *LONGER, devices=1) == 0
    assert [*losses(tmp_path / "moved")] == [*range(1, 9)]
    before, now = (json.loads((of / "config.json").read_text()) for of in (folder / "finished", tmp_path / "moved"))
    assert now["config"] == before["config"] | {"steps": 8, "run_dir": "moved"}
    assert run("train", monkeypatch, "--run_dir=nowhere", devices=1) == 2
    assert "nowhere holds no run" in capsys.readouterr().err


def test_a_run_whose_tokenizer_was_elsewhere_continues_with_its_own(folder, tmp_path, monkeypatch):
    run_dir = copy_of(folder, "of-a-tokenizer")
    record = json.loads((run_dir / "config.json").read_text())
    record["config"]["data"]["tokenizer"] = "/gone/tokenizer"
    (run_dir / "config.json").write_text(json.dumps(record))
    monkeypatch.setenv("TOKENSUM_CACHE", str(tmp_path))
    own = config_of_continued(str(run_dir)).data.tokenizer
    assert load_tokenizer(own).sha256 == load_tokenizer(run_dir / "tokenizer").sha256


def test_options_that_differ_are_listed_before_the_tokenizer_that_follows_from_them(folder, monkeypatch, capsys):
    copy_of(folder, "other")
    (folder / "others").mkdir()
    for i in range(40):
        (folder / "others" / f"{i}.txt").write_text(" ".join(f"{n:x}" for n in range(1000 * i, 1000 * i + 500)))
    before = content(folder / "other")
    assert start(monkeypatch, folder, "--run_dir=other", "--data.source=others", "--steps=7") == 2
    said = capsys.readouterr().err
    assert f"  steps: 6 -> 7\n  data.source: {folder}/text -> {folder}/others\n  dataset: " in said
    assert content(folder / "other") == before
    accepted = ("--run_dir=other", "--data.source=others", "--accept_changes")
    assert start(monkeypatch, folder, *accepted) == 2 and "has another tokenizer" in capsys.readouterr().err


def test_a_run_keeps_its_type_on_a_machine_where_another_is_faster(folder, monkeypatch, capsys):
    monkeypatch.setattr("run.dtype.fastest_dtype", lambda platform: ("bfloat16", "it is faster here"))
    assert start(monkeypatch, folder, "--run_dir=finished", "--model.dtype=auto") == 0
    said = capsys.readouterr().out
    assert "--model.dtype=auto: float32, since the run began with it\n" in said and "is complete" in said
    assert start(monkeypatch, folder, "--run_dir=finished", "--model.dtype=bfloat16") == 2
    assert "\n  model.dtype: float32 -> bfloat16\n" in capsys.readouterr().err
    assert start(monkeypatch, folder, "--run_dir=new", "--model.dtype=auto", "--steps=1") == 0
    assert "--model.dtype=auto: bfloat16, since it is faster here\n" in capsys.readouterr().out
    assert json.loads((folder / "new" / "config.json").read_text())["config"]["model"]["dtype"] == "bfloat16"


LONGER, FEWER = ("--steps=8", "--accept_changes"), ("--steps=4", "--accept_changes")


@pytest.mark.parametrize(
    ("lost", "config", "options", "says"),
    [
        ("checkpoints", None, LONGER, "was saved up to step 6"),
        (None, None, FEWER, "has come to step 6 already"),
        *((None, text, (), "config.json cannot be read") for text in ("", "[]")),
        (None, '{"config": {}}', (), "config.json is from another version"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_refused_and_keeps_its_record(
    folder, tmp_path, monkeypatch, capsys, lost, config, options, says
):
    run_dir = Path(shutil.copytree(folder / "finished", tmp_path / "run"))
    if lost:
        shutil.rmtree(run_dir / lost)
    if config is not None:
        (run_dir / "config.json").write_text(config)
    before = content(run_dir)
    assert start(monkeypatch, folder, f"--run_dir={run_dir}", *options) == 2
    assert says in capsys.readouterr().err
    assert content(run_dir) == before


def test_a_change_that_the_checkpoint_cannot_follow_is_not_recorded(folder, monkeypatch, capsys):
    run_dir = copy_of(folder, "changed")
    before, change = content(run_dir), "--optimizer.matrices.kind=muon"
    assert start(monkeypatch, folder, f"--run_dir={run_dir}", "--accept_changes", "--steps=7", change) == 2
    assert "made with another optimizer" in capsys.readouterr().err and content(run_dir) == before
    assert start(monkeypatch, folder, f"--run_dir={run_dir}") == 0  # the original command is still accepted


def test_a_complete_run_lists_the_changes_that_it_can_no_longer_follow(folder, monkeypatch, capsys):
    run_dir = copy_of(folder, "complete")
    before = content(run_dir)
    change = ("--optimizer.embed.peak_rate=0.3", "--seed=4", "--accept_changes")
    assert start(monkeypatch, folder, "--run_dir=complete", *change) == 2
    said = capsys.readouterr().err
    assert "seed: 0 -> 4" in said and "optimizer.embed.peak_rate: 0.2 -> 0.3" in said
    assert content(run_dir) == before


@pytest.mark.medium
def test_a_summary_of_fewer_steps_and_a_folder_with_a_number_do_not_make_a_run_complete(folder, monkeypatch, capsys):
    run_dir = copy_of(folder, "longer")
    summary = (run_dir / "summary.json").read_text()
    assert start(monkeypatch, folder, "--run_dir=longer", "--steps=8", "--accept_changes") == 0
    (run_dir / "summary.json").write_text(summary)  # as if killed before it wrote its own
    (run_dir / "checkpoints" / "99").mkdir()
    capsys.readouterr()
    assert start(monkeypatch, folder, "--run_dir=longer", "--steps=8") == 0
    assert "is complete" not in capsys.readouterr().out
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 8
    assert start(monkeypatch, folder, "--run_dir=longer", "--steps=8") == 0
    assert "is complete: 8 steps" in capsys.readouterr().out


@pytest.mark.medium
def test_with_another_tokens_per_step_the_data_continue_at_the_same_token(folder, monkeypatch, capsys):
    """Two steps of 8 rows read what four of 4 rows would read. With Adam's rates at 0, the losses agree too."""
    still = [f"--optimizer.{group}.peak_rate=1e-30" for group in ("embed", "matrices", "lm_head")]
    rates = [*still, "--seed=3"]
    assert start(monkeypatch, folder, "--run_dir=eights", "--steps=4", "--batch.tokens_per_step=256", *rates) == 0
    assert start(monkeypatch, folder, "--run_dir=mixed", "--steps=4", *rates) == 0
    change = ("--steps=6", "--batch.tokens_per_step=256", "--accept_changes")
    capsys.readouterr()
    assert start(monkeypatch, folder, "--run_dir=mixed", *change, *rates) == 0
    assert "in 1,024 tokens the run goes through text" in capsys.readouterr().out
    eights, mixed = losses(folder / "eights"), losses(folder / "mixed")
    assert eights[1] == pytest.approx((mixed[1] + mixed[2]) / 2, rel=1e-6)
    assert [mixed[5], mixed[6]] == pytest.approx([eights[3], eights[4]], rel=1e-6)
    tokens = [line["tokens"] for line in RunFolder(folder / "mixed").metrics() if "loss" in line]
    assert tokens == [128, 256, 384, 512, 768, 1024]
    assert json.loads((folder / "mixed" / "summary.json").read_text())["tokens"] == 1024


@pytest.mark.medium
def test_a_run_goes_back_to_an_older_checkpoint_once_and_another_seed_changes_its_rows(folder, monkeypatch, capsys):
    """The same command again continues: a launcher that repeats it must not go back for ever."""
    options = ("--checkpoint.keep=9", "--run_dir=back")
    assert start(monkeypatch, folder, *options) == 0
    run_dir, untouched = folder / "back", losses(folder / "finished")
    assert start(monkeypatch, folder, *options, "--resume_step=3") == 2
    assert "--resume_step=3" in (said := capsys.readouterr().err) and "2, 4, 6" in said
    (run_dir / "summary.json").unlink()
    assert start(monkeypatch, folder, *options, "--resume_step=2") == 0
    assert losses(run_dir) == untouched  # the same rows
    assert sorted(path.name[0] for path in (run_dir / "newer-checkpoints").iterdir()) == ["4", "6"]
    again = (*options, "--resume_step=4", "--seed=1", "--accept_changes")
    for _ in range(2):
        capsys.readouterr()
        assert start(monkeypatch, folder, *again) == 0
    assert "is complete" in capsys.readouterr().out
    changed = losses(run_dir)
    assert {step for step in changed if changed[step] != untouched[step]} == {5, 6}
    events = RunFolder(run_dir).events.read()
    assert [event["step"] for event in events if event["event"] == "went_back"] == [2, 4]
    assert [(e["step"], e["tokens"]) for e in events if e["event"] == "start"] == [(0, 0), (2, 256), (4, 512)]


def test_each_start_records_its_versions(folder, monkeypatch):
    run_dir = copy_of(folder, "other-code")
    monkeypatch.setattr("run.describe.code_digest", lambda: "feedbeef")
    where = f"--data.source={folder}/text"  # the same source in other words
    assert start(monkeypatch, folder, "--run_dir=other-code", where, "--steps=7", "--accept_changes") == 0
    record = json.loads((run_dir / "config.json").read_text())
    assert record["changes"] == [["steps: 6 -> 7"]] and record["config"]["data"]["source"] == f"{folder}/text"
    first, second = [event for event in RunFolder(run_dir).events.read() if event["event"] == "start"]
    assert first["code_hash"] != second["code_hash"] == "feedbeef" and first["versions"]["jax"] == jax.__version__
    assert first["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1} and first["devices"] == "1 x cpu, 1 process(es)"
