"""Run configs/chat.py on a tiny run and a few conversations: complete, killed and resumed."""

import json
from pathlib import Path

import pytest

from tests.commands import ROOT, assert_as_untouched, killed_after, run, summary, write_folder
from tests.run.short_runs import CONFIG

BASE = CONFIG.replace("MatricesConfig(0.002)", 'MatricesConfig(0.002, kind="muon")').replace("kv_heads=1", "kv_heads=2")
CHAT = (f"--config={ROOT}/configs/chat.py", "--init_from=base", "--data.source=chats", "--model.dtype=float32")
OFTEN = ("--checkpoint.every_steps=4", "--log.every_steps=1", "--batch.rows_per_device=2")


@pytest.mark.medium
def test_an_epoch_of_conversations_is_complete_and_resumed_to_the_bit_without_its_base(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(write_folder(tmp_path, BASE))
    start = lambda *words: run("train", monkeypatch, *words, devices=1)
    words = (ROOT / "tests/words.txt").read_text().split()
    message = lambda role, start, count: {"role": role, "content": " ".join(words[start : start + count])}
    chats = [[message("user", i, 1 + i % 3), message("assistant", 2 * i, 1 + i % 5)] for i in range(104)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    assert start("--config=tiny.py", "--run_dir=base", "--steps=2") == 0
    made = ("--source=chats.jsonl", "--conversations", "--out=chats", "--tokenizer=base/tokenizer")
    assert run("prepare", monkeypatch, *made, "--val_fraction=0.2") == 0
    assert start(*CHAT, *OFTEN, "--run_dir=chat") == 0
    record = json.loads(Path("chat/config.json").read_text())["config"]
    assert record["steps"] == summary(Path("chat"))["steps"] > 8 and record["model"]["width"] == 32
    printed = capfd.readouterr().out
    assert "goes through chats 0.9" in printed  # steps are rounded down
    assert f"--epochs=1 of this text is only {record['steps']} step(s)" in printed

    again = killed_after(record["steps"] - 1, Path("chat"), "without-base")
    Path("base").rename("gone")
    for refused, says in (
        ((*CHAT, *OFTEN, "--run_dir=new"), "base holds no run"),
        ((CHAT[0], "--init_from=typo", CHAT[2], f"--run_dir={again}"), "typo holds no run"),
        ((*CHAT, f"--run_dir={again}", "--init_optimizer=False"), "init_optimizer: True -> False"),
    ):
        assert start(*refused) == 2 and says in capfd.readouterr().err
    assert start(*CHAT, *OFTEN, f"--run_dir={again}") == 0
    assert f"python chat.py --run_dir={again}" in capfd.readouterr().out
    assert_as_untouched(again, Path("chat"))
