"""Test ChatCORE: nanochat's items and answers on any mesh, resuming after a kill, and incomplete sets."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import evaluate
from configs.schema import UserError
from evaluate import evaluate_core
from evaluation import item_log
from evaluation.chat_core import ChatCore, read_chat_tasks
from evaluation.item_log import ItemLog
from tests.evaluation import core_bundle, nanochat_chat
from tests.evaluation.nanochat_chat import FOLDERS, columns, make_sets, network


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return make_sets(tmp_path_factory.mktemp("sets"))


NANOCHAT_S = json.loads(nanochat_chat.RESULTS.read_text())


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, 8])
def test_every_item_equals_nanochat_s_chat_eval_on_any_mesh(sets, devices):
    ours, log = network(devices), ItemLog()
    tasks = read_chat_tasks(str(sets), None)
    ChatCore(tasks, ours, ours.scorer())(ours.params, log)
    for task in tasks:
        lines = sorted((line for line in log.lines if line["task"] == task.label), key=lambda line: line["item"])
        for line, item, (right, answer) in zip(lines, task.items, NANOCHAT_S[task.label], strict=True):
            too_long = len(item["messages"][0]["content"]) > 500
            assert line["cut"] == too_long
            assert line["correct"] == (right and not too_long)
            ours_answer = line["text"] if task.label == "GSM8K" else item["letters"][line["choice"]]
            assert ours_answer == ("" if too_long else answer), line
    written = [line for line in log.lines if line["task"] == "GSM8K"]
    assert len({line["text"] for line in written}) > 3 and {line["correct"] for line in written} == {True, False}


@pytest.mark.slow
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no checkout of nanochat")
def test_stored_answers_equal_those_of_nanochat_s_checkout(monkeypatch):
    pytest.importorskip("torch")
    assert nanochat_chat.their_answers(monkeypatch) == NANOCHAT_S


@pytest.mark.medium
def test_the_command_resumes_after_a_kill(sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(item_log, "AT_A_TIME", 4)
    monkeypatch.setattr(evaluate, "open_network", lambda *_: network())
    monkeypatch.setattr(evaluate, "is_network", lambda _: True)
    options = ["--from=x", "--tasks=chatcore", f"--bundle={sets}", "--items=6", "--json", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["evaluate", *options])
    folder, append = tmp_path / "chatcore" / "network_items_6", item_log.append_whole

    def append_until_killed(path, text):
        append(path, text)
        if "GSM8K" in text:
            raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(item_log, "append_whole", append_until_killed)
        evaluate.main()
    assert len((folder / "items.jsonl").read_text().splitlines()) == 1 + 3 * 6 + 4
    assert evaluate.main() == 0
    results = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()[1:]]
    assert sorted((line["task"], line["item"]) for line in lines) == sorted((x, i) for x in FOLDERS for i in range(6))
    centred = [results["tasks"][label]["centered"] for label in FOLDERS]
    assert results["chatcore"] == pytest.approx(sum(centred) / 4) and results["tasks"]["MMLU"]["baseline"] == 0.25
    assert {"items.jsonl", "chatcore.json", "chatcore.png"} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "label, changed, message",
    [
        ("GSM8K", None, "gsm8k"),
        ("MMLU", {"answer": [4] * 9}, "mmlu/all/test.*: row 1 is no item of MMLU"),
        ("MMLU", {"choices": [["x"]] * 9}, "row 1 is no item of MMLU"),
        ("ARC-Easy", {"answerKey": ["Z"] * 9}, "row 1 is no item of ARC-Easy"),
        ("GSM8K", {"answer": ["three"] * 9}, "row 1 is no item of GSM8K .*no number after ####"),
        ("GSM8K", {"question": None}, "no column question"),
    ],
)
def test_incomplete_sets_are_refused_with_the_reason(tmp_path, label, changed, message):
    file = make_sets(tmp_path) / FOLDERS[label] / "test-00000-of-00001.parquet"
    file.unlink()
    if changed:
        left = {name: column for name, column in (columns(label) | changed).items() if column}
        pyarrow.parquet.write_table(pyarrow.table(left), file)
    with pytest.raises(UserError, match=message):
        read_chat_tasks(str(tmp_path), None)


def test_one_item_and_a_tokenizer_without_conversations_are_refused(sets):
    with pytest.raises(UserError, match="needs 2 items at least; 1 are taken"):
        read_chat_tasks(str(sets), 1)
    bare = core_bundle.tokenizer().json.replace("<|assistant_end|>", "<|old|>")
    ours = replace(network(), tokenizer=replace(core_bundle.tokenizer(), json=bare))
    with pytest.raises(UserError, match=r"no <\|assistant_end\|>: it was not trained on conversations"):
        evaluate_core(ours, read_chat_tasks(str(sets), 2), None, Path("nowhere"), "chatcore")
