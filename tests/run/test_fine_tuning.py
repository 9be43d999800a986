"""Run configs/chat.py on a tiny run and a few conversations: killed, resumed, and resumed on another mesh."""

import json
from pathlib import Path

import pytest

from tests.run.test_continuing import CONFIG
from tests.test_train import ROOT, assert_as_untouched, killed_after, run, summary, write_folder

BASE = CONFIG.replace("MatricesConfig(0.002)", 'MatricesConfig(0.002, kind="muon")').replace("kv_heads=1", "kv_heads=2")
CHAT = (f"--config={ROOT}/configs/chat.py", "--init_from=base", "--data.source=chats", "--model.dtype=float32")
OFTEN = ("--checkpoint.every_steps=4", "--log.every_steps=1", "--batch.rows_per_device=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a run, conversations in its tokens, and a run that was fine-tuned on them."""
    folder = write_folder(tmp_path_factory.mktemp("user"), BASE)
    words = (ROOT / "tests/words.txt").read_text().split()
    message = lambda role, start, count: {"role": role, "content": " ".join(words[start : start + count])}
    chats = [[message("user", i, 1 + i % 3), message("assistant", 2 * i, 1 + i % 5)] for i in range(120)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
        assert run("train", patch, "--config=tiny.py", "--run_dir=base", devices=1) == 0
        made = ("--source=chats.jsonl", "--conversations", "--out=chats", "--tokenizer=base/tokenizer")
        assert run("prepare", patch, *made, "--val_fraction=0.2") == 0
        assert run("train", patch, *CHAT, *OFTEN, "--run_dir=chat", devices=1) == 0
    return folder


@pytest.mark.medium
def test_an_epoch_is_resolved_and_complete(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    record = json.loads(Path("chat/config.json").read_text())["config"]
    assert record["steps"] == summary(Path("chat"))["steps"] > 8 and record["model"]["width"] == 32
    assert run("train", monkeypatch, *CHAT, "--run_dir=chat", devices=1) == 0
    output = capfd.readouterr().out
    assert (
        f"chat is complete: {record['steps']} steps" in output and "goes through chats 0.9" in output
    )  # steps are rounded down


@pytest.mark.medium
def test_it_is_resumed_to_the_bit_without_its_base(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    again = killed_after(summary(Path("chat"))["steps"] - 1, Path("chat"), "without-base")
    Path("base").rename("gone")
    try:
        assert run("train", monkeypatch, *CHAT, *OFTEN, "--run_dir=new", devices=1) == 2
        assert "base holds no run" in capfd.readouterr().err
        assert run("train", monkeypatch, CHAT[0], "--init_from=typo", CHAT[2], f"--run_dir={again}", devices=1) == 2
        assert "typo holds no run" in capfd.readouterr().err
        assert run("train", monkeypatch, *CHAT, *OFTEN, f"--run_dir={again}", devices=1) == 0
        assert f"python chat.py --run_dir={again}" in capfd.readouterr().out
        assert run("train", monkeypatch, *CHAT, f"--run_dir={again}", "--init_optimizer=False", devices=1) == 2
        assert "init_optimizer: True -> False" in capfd.readouterr().err
    finally:
        Path("gone").rename("base")
    assert_as_untouched(again, Path("chat"))
